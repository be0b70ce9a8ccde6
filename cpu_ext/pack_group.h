// Groups of weights of 16 rows while they are packed, one register or a few for each k: how they are read
// from a matrix, and numbers rounded to fewer bits. All arithmetic is float32, one operation at a time.
#pragma once

#include <emmintrin.h>
#include <string.h>

#include "pack.h"
#include "pack_sizes.h"
#include "small_floats.h"

namespace hetero {
namespace {

constexpr int kMaxGroup = 128;
constexpr float kMostE4m3 = 448.0f, kMostE2m1 = 6.0f;

// A group of up to 128 k for 16 rows, k-major, zero where there is no weight.
struct Group {
  alignas(64) float v[kMaxGroup][kRows];
};

// Numbers of neighbouring rows in one register of so many bytes.
template <int Bytes>
struct Vectors {
  static constexpr int kLanes = Bytes / 4;
  typedef float Floats __attribute__((vector_size(Bytes)));
  typedef int32_t Ints __attribute__((vector_size(Bytes)));
  typedef uint32_t Bits __attribute__((vector_size(Bytes)));
  typedef uint16_t Halves __attribute__((vector_size(Bytes / 2)));
  typedef uint8_t Octets __attribute__((vector_size(Bytes / 4)));
};
#define HETERO_INLINE inline __attribute__((always_inline))
#define HETERO_VECTORS(Bytes)                                      \
  [[maybe_unused]] typedef typename Vectors<Bytes>::Floats Floats; \
  [[maybe_unused]] typedef typename Vectors<Bytes>::Ints Ints;     \
  [[maybe_unused]] typedef typename Vectors<Bytes>::Bits Bits;     \
  [[maybe_unused]] typedef typename Vectors<Bytes>::Halves Halves; \
  [[maybe_unused]] typedef typename Vectors<Bytes>::Octets Octets; \
  [[maybe_unused]] constexpr int kLanes = Vectors<Bytes>::kLanes
// name(...) for the registers of the machine, from a template name_by<bytes>(...) over all rows.
#define HETERO_VERSIONS(type, name, parameters, arguments)                                    \
  __attribute__((target("avx512f"))) type name parameters { return name##_by<64> arguments; } \
  __attribute__((target("avx2"))) type name parameters { return name##_by<32> arguments; }    \
  __attribute__((target("default"))) type name parameters { return name##_by<16> arguments; }
#pragma GCC diagnostic ignored "-Wpsabi"  // no such function is ever called: all are part of their callers

template <class Vector, class T>
HETERO_INLINE Vector load_as(const T* from) {
  Vector value;
  memcpy(&value, from, sizeof value);
  return value;
}
template <class Vector, class T>
HETERO_INLINE void store_as(T* to, Vector value) {
  memcpy(to, &value, sizeof value);
}

// To fp16 and E4M3: to nearest, ties to even; infinite from 65520 on, the largest beyond 448. No NaN comes
// here.
template <int Bytes, class Floats = typename Vectors<Bytes>::Floats,
          class Bits = typename Vectors<Bytes>::Bits>
HETERO_INLINE Bits to_half(Floats value) {
  using Ints = typename Vectors<Bytes>::Ints;
  const Bits bits = (Bits)value, sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  const Bits subnormal = (Bits)((Floats)rest + 0.5f) - float_to_bits(0.5f);
  const Bits normal = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
  const Bits finite = (Ints)rest < (113 << 23) ? subnormal : normal;
  return sign | ((Ints)rest < static_cast<int32_t>(float_to_bits(65520.0f)) ? finite : Bits{} + 0x7c00u);
}
template <int Bytes, class Floats = typename Vectors<Bytes>::Floats,
          class Bits = typename Vectors<Bytes>::Bits>
HETERO_INLINE Floats from_half(Bits half) {
  using Ints = typename Vectors<Bytes>::Ints;
  const Bits sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  const Bits subnormal = (Bits)(__builtin_convertvector((Ints)rest, Floats) * 0x1p-24f);
  const Bits normal = (rest << 13) + (112u << 23), special = (rest << 13) + (224u << 23);
  const Bits large = (Ints)rest < 0x7c00 ? normal : special;
  return (Floats)(sign | ((Ints)rest < 0x400 ? subnormal : large));
}
template <int Bytes, class Floats = typename Vectors<Bytes>::Floats,
          class Bits = typename Vectors<Bytes>::Bits>
HETERO_INLINE Bits to_e4m3(Floats value) {
  using Ints = typename Vectors<Bytes>::Ints;
  const Bits bits = (Bits)value, rest = bits & 0x7fffffffu;
  const Bits limit = Bits{} + float_to_bits(kMostE4m3);
  const Bits bounded = (Ints)rest < (Ints)limit ? rest : limit;
  // The numbers below 2^-6 are multiples of 2^-9; adding 2^14 rounds to one.
  const Bits subnormal = (Bits)((Floats)bounded + 16384.0f) - float_to_bits(16384.0f);
  const Bits normal = ((bounded + 0x7ffffu + (bounded >> 20 & 1u)) >> 20) - (120u << 3);
  return (bits >> 24 & 0x80u) | ((Ints)bounded < (121 << 23) ? subnormal : normal);
}

template <typename T, typename Convert>
inline void gather(const Source& source, int64_t row, int64_t rows, int64_t k0, int64_t count, Group* group,
                   Convert convert) {
  const T* from = static_cast<const T*>(source.data) + row * source.row_stride + k0 * source.col_stride;
  for (int64_t i = 0; i < count; i++)
    for (int64_t r = 0; r < rows; r++)
      group->v[i][r] = convert(from[r * source.row_stride + i * source.col_stride]);
}

// Rows of a source that lie side by side in memory, a transposed matrix, to a group of 16 rows.
template <typename T, typename Convert>
inline void gather_columns(const Source& source, int64_t row, int64_t k0, int64_t count, Group* group,
                           Convert convert) {
  const T* from = static_cast<const T*>(source.data) + row + k0 * source.col_stride;
  for (int64_t i = 0; i < count; i++, from += source.col_stride)
    for (int r = 0; r < kRows; r++) group->v[i][r] = convert(from[r]);
}
HETERO_CLONES void columns_f32(const Source& source, int64_t row, int64_t k0, int64_t count, Group* group) {
  gather_columns<float>(source, row, k0, count, group, [](float x) { return x; });
}
HETERO_CLONES void columns_bf16(const Source& source, int64_t row, int64_t k0, int64_t count, Group* group) {
  gather_columns<uint16_t>(source, row, k0, count, group, bf16_to_float);
}
HETERO_CLONES void columns_f16(const Source& source, int64_t row, int64_t k0, int64_t count, Group* group) {
  gather_columns<uint16_t>(source, row, k0, count, group, half_to_float);
}

// Words of four bytes of 16 rows, `words` of each, a multiple of 4, to [words][16].
using Words = uint32_t[kMaxGroup][kRows];
void turn_words(const uint8_t* const* rows, int64_t words, uint32_t (*to)[kRows]) {
  for (int r = 0; r < kRows; r += 4)
    for (int64_t w = 0; w < words; w += 4) {
      auto row = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + i] + 4 * w));
      };
      const __m128i a = row(0), b = row(1), c = row(2), d = row(3);
      const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
      const __m128i ab2 = _mm_unpackhi_epi32(a, b), cd2 = _mm_unpackhi_epi32(c, d);
      auto put = [&](int i, __m128i v) { _mm_store_si128(reinterpret_cast<__m128i*>(to[w + i] + r), v); };
      put(0, _mm_unpacklo_epi64(ab, cd));
      put(1, _mm_unpackhi_epi64(ab, cd));
      put(2, _mm_unpacklo_epi64(ab2, cd2));
      put(3, _mm_unpackhi_epi64(ab2, cd2));
    }
}

// Words of two numbers of 16 bits each: the lower half is of the even k.
template <int Bytes>
HETERO_INLINE void widen_bf16_by(const uint32_t (*words)[kRows], int64_t count, Group* group) {
  HETERO_VECTORS(Bytes);
  for (int64_t i = 0; i < count; i++)
    for (int r = 0; r < kRows; r += kLanes) {
      const Bits two = load_as<Bits>(words[i] + r);
      store_as(group->v[2 * i] + r, two << 16);
      store_as(group->v[2 * i + 1] + r, two & 0xffff0000u);
    }
}
HETERO_VERSIONS(void, widen_bf16, (const uint32_t (*words)[kRows], int64_t count, Group* group),
                (words, count, group))
template <int Bytes>
HETERO_INLINE void widen_f16_by(const uint32_t (*words)[kRows], int64_t count, Group* group) {
  HETERO_VECTORS(Bytes);
  for (int64_t i = 0; i < count; i++)
    for (int r = 0; r < kRows; r += kLanes) {
      const Bits two = load_as<Bits>(words[i] + r);
      store_as(group->v[2 * i] + r, from_half<Bytes>(two & 0xffffu));
      store_as(group->v[2 * i + 1] + r, from_half<Bytes>(two >> 16));
    }
}
HETERO_VERSIONS(void, widen_f16, (const uint32_t (*words)[kRows], int64_t count, Group* group),
                (words, count, group))

// Where the rows of a block begin at k0; rows beyond n are of zeros.
void row_places(const Layout& layout, const Source& source, int64_t row, int64_t k0, const uint8_t** places) {
  alignas(64) static const uint8_t zeros[4 * kMaxGroup] = {};
  const int64_t size = source.type == kSourceF32 ? 4 : 2;
  for (int r = 0; r < kRows; r++)
    places[r] = row + r < layout.n
                    ? static_cast<const uint8_t*>(source.data) + ((row + r) * source.row_stride + k0) * size
                    : zeros;
}

// Values [row, row + 16) x [k0, k0 + size) of the source, `size` a multiple of 8.
void load_group(const Layout& layout, const Source& source, int64_t row, int64_t k0, int64_t size,
                Group* group) {
  const int64_t rows = layout.n - row < kRows ? layout.n - row : kRows;
  const int64_t count = layout.k - k0 < size ? layout.k - k0 : size;
  const bool f32 = source.type == kSourceF32, bf16 = source.type == kSourceBf16;
  if (source.col_stride == 1 && count == size) {
    const uint8_t* places[kRows];
    row_places(layout, source, row, k0, places);
    if (f32) return turn_words(places, size, reinterpret_cast<uint32_t (*)[kRows]>(group->v));
    alignas(64) Words words;
    turn_words(places, size / 2, words);
    return bf16 ? widen_bf16(words, size / 2, group) : widen_f16(words, size / 2, group);
  }
  if (rows < kRows || count < size) memset(group->v, 0, static_cast<size_t>(size) * kRows * sizeof(float));
  if (count <= 0) return;
  if (source.row_stride == 1 && rows == kRows) {
    return f32    ? columns_f32(source, row, k0, count, group)
           : bf16 ? columns_bf16(source, row, k0, count, group)
                  : columns_f16(source, row, k0, count, group);
  }
  if (f32)
    gather<float>(source, row, rows, k0, count, group, [](float x) { return x; });
  else if (bf16)
    gather<uint16_t>(source, row, rows, k0, count, group, bf16_to_float);
  else
    gather<uint16_t>(source, row, rows, k0, count, group, half_to_float);
}

}  // namespace
}  // namespace hetero
