#include "fields.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>

namespace hetero {
namespace {

constexpr int64_t kTile = 64;  // codes of a row that are written together: one line of the cache
constexpr int kRowOf[8] = {0, 2, 4, 6, 1, 3, 5, 7};

template <class T>
__m128i load(const T* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// The halves of 16 bytes: the first 16 and the last.
void halves(__m128i x, __m128i* first, __m128i* last) {
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(x, mask), high = _mm_and_si128(_mm_srli_epi16(x, 4), mask);
  *first = _mm_unpacklo_epi8(low, high);
  *last = _mm_unpackhi_epi8(low, high);
}

// 16 lines of 16 bytes, turned.
void turn_bytes(__m128i* lines) {
  __m128i other[16];
  // Each round pairs line i with line i + 8; after four rounds byte r of line i is byte i of line r.
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      other[2 * i] = _mm_unpacklo_epi8(lines[i], lines[i + 8]);
      other[2 * i + 1] = _mm_unpackhi_epi8(lines[i], lines[i + 8]);
    }
    std::memcpy(lines, other, sizeof other);
  }
}

}  // namespace

void split_bytes(const uint8_t* from, int64_t count, uint8_t* out) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    __m128i first, last;
    halves(load(from + i), &first, &last);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), first);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i + 16), last);
  }
  for (; i < count; ++i) {
    out[2 * i] = from[i] & 15;
    out[2 * i + 1] = from[i] >> 4;
  }
}

void turn_words_of(int bits, const uint32_t* words, int64_t m, int64_t n, uint8_t* out) {
  const int64_t fields = 32 / bits, k = m * fields, tile = kTile / fields;
  const uint32_t mask = bits == 8 ? 255 : 15;
  for (int64_t m0 = 0; m0 < m; m0 += tile) {
    const int64_t end = std::min(m, m0 + tile);
    int64_t row = 0;
    for (; row + 4 <= n; row += 4) {
      for (int64_t i = m0; i < end; ++i) {
        const __m128i four = load(words + i * n + row);
        uint8_t* to = out + row * k + i * fields;
        if (bits == 8) {
          alignas(16) uint32_t each[4];
          _mm_store_si128(reinterpret_cast<__m128i*>(each), four);
          for (int64_t r = 0; r < 4; ++r) std::memcpy(to + r * k, each + r, 4);
          continue;
        }
        __m128i first, last;
        halves(four, &first, &last);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), first);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + k), _mm_unpackhi_epi64(first, first));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * k), last);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 3 * k), _mm_unpackhi_epi64(last, last));
      }
    }
    for (; row < n; ++row)
      for (int64_t i = m0; i < end; ++i)
        for (int64_t f = 0; f < fields; ++f)
          out[row * k + i * fields + f] = static_cast<uint8_t>(words[i * n + row] >> bits * f & mask);
  }
}

void turn_shuffled(const uint32_t* words, int64_t k, int64_t n, uint8_t* out) {
  const int64_t per_k = n / 8, whole_n = n / 16 * 16, whole_k = k / 16 * 16;
  for (int64_t k0 = 0; k0 < whole_k; k0 += kTile)
    for (int64_t row = 0; row < whole_n; row += 16)
      for (int64_t at = k0; at < std::min(whole_k, k0 + kTile); at += 16) {
        __m128i lines[16];
        for (int64_t i = 0; i < 16; ++i) {
          const uint32_t* two = words + (at + i) * per_k + row / 8;
          __m128i shuffled, unused;
          halves(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(two)), &shuffled, &unused);
          // Of each word the even rows, then the odd ones: one of each in turn.
          const __m128i even = _mm_shuffle_epi32(shuffled, 0x08), odd = _mm_shuffle_epi32(shuffled, 0x0d);
          lines[i] = _mm_unpacklo_epi8(even, odd);
        }
        turn_bytes(lines);
        for (int64_t r = 0; r < 16; ++r)
          _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (row + r) * k + at), lines[r]);
      }
  auto one = [&](int64_t at, int64_t first_row) {
    for (int64_t row = first_row; row < n; row += 8)
      for (int f = 0; f < 8; ++f)
        out[(row + kRowOf[f]) * k + at] = static_cast<uint8_t>(words[at * per_k + row / 8] >> 4 * f & 15);
  };
  for (int64_t at = 0; at < whole_k; ++at) one(at, whole_n);
  for (int64_t at = whole_k; at < k; ++at) one(at, 0);
}

}  // namespace hetero
