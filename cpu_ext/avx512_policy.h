// The policy of exact.h and act.h on AVX-512 F/BW/VL/DQ, without the integer dot, which each unit adds.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "codes.h"
#include "kernels.h"

namespace hetero {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kGemvBlocks = 2, kMaxSums = 8;
  static constexpr int kFloatRows = 4, kFloatUnits = 2;
  using F = __m512;
  using I = __m512i;
  struct W {
    __m512i v[8];
  };
  using Lookup = __m512i;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F abs(F a) { return from_bits(_mm512_and_si512(bits(a), _mm512_set1_epi32(0x7fffffff))); }
  static F where_greater(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
  }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I bits(F a) { return _mm512_castps_si512(a); }
  static F from_bits(I a) { return _mm512_castsi512_ps(a); }
  static I set1i(int32_t x) { return _mm512_set1_epi32(x); }
  static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
  static I subi(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I half_down(I a) { return _mm512_srai_epi32(a, 1); }
  static I shift_to_exponent(I a) { return _mm512_slli_epi32(a, 23); }
  static I load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }

  static F half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F bf_even(const uint8_t* p) { return from_bits(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
  static F bf_odd(const uint8_t* p) {
    return from_bits(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }

  // E4M3 bits in the high bytes of words -> fp16 bits.
  static I half_bits(I words) {
    return _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
  }
  static void e4m3(const uint8_t* p, F* w) {
    const I step = _mm512_loadu_si512(p);
    const I first = _mm512_set4_epi32(static_cast<int32_t>(0x0d800c80u), static_cast<int32_t>(0x09800880u),
                                      static_cast<int32_t>(0x05800480u), static_cast<int32_t>(0x01800080u));
    const I second = _mm512_add_epi8(first, _mm512_set1_epi16(0x0200));
    const I a = half_bits(_mm512_shuffle_epi8(step, first)), b = half_bits(_mm512_shuffle_epi8(step, second));
    w[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(a));
    w[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1));
    w[2] = _mm512_cvtph_ps(_mm512_castsi512_si256(b));
    w[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(b, 1));
  }
  static F pair(const float* p) {
    double both;
    memcpy(&both, p, 8);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
  }
  static F fold(F first, F second) {
    const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return add(_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second));
  }
  static F bytes(const uint8_t* p) {
    return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  template <int Format>
  static F scale(const uint8_t* p) {
    constexpr Scale kScale = Codes<Format>::kOf.scale;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if (kScale == Scale::kUnsigned) return to_float(_mm512_cvtepu8_epi32(bytes));
    if (kScale == Scale::kSigned) return to_float(_mm512_cvtepi8_epi32(bytes));
    if (kScale == Scale::kE8m0) {
      const I power = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
      return mul(from_bits(_mm512_max_epi32(power, _mm512_set1_epi32(0x00400000))), set1(0.5f));
    }
    if (kScale == Scale::kE4m3) {
      const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
      return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
    }
    return half(reinterpret_cast<const uint16_t*>(p));
  }
  static void half_sums(const int8_t* a, int32_t* sums) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i shifted = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
    const __m256i eights = _mm256_sad_epu8(shifted, _mm256_setzero_si256());
    const __m256i both = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(both)) - 16 * 128;
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(both, 1)) - 16 * 128;
  }

  static Lookup lookup(const Table& table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table.codes)));
  }
  template <int Format>
  static I number(I code, Lookup table) {
    return Codes<Format>::kTable ? _mm512_shuffle_epi8(table, code) : code;
  }
  static I raw(const uint8_t* p) { return _mm512_loadu_si512(p); }
  // The bits of Mask of `bits`, beside those of `others`.
  template <uint8_t Mask>
  static I joined(I bits, I others) {
    return _mm512_ternarylogic_epi32(bits, _mm512_set1_epi8(static_cast<char>(Mask)), others, 0xea);
  }
  // Codes of 2, 3, 5 and 6 bits, see kernels.h. `moved` brings a plane's bit From to bit To of a byte.
  template <int From, int To>
  static I moved(I x) {
    if constexpr (From > To) return _mm512_srli_epi16(x, From - To);
    if constexpr (From < To) return _mm512_slli_epi16(x, To - From);
    return x;
  }
  template <int To, int Step>
  static void add_pairs(const uint8_t* p, W& r) {  // a plane of 2 bits
    constexpr uint8_t kMask = 3 << To;
    const I x = raw(p + Step / 4 * 64);
    r.v[Step] = joined<kMask>(moved<0, To>(x), r.v[Step]);
    r.v[Step + 1] = joined<kMask>(moved<2, To>(x), r.v[Step + 1]);
    r.v[Step + 2] = joined<kMask>(moved<4, To>(x), r.v[Step + 2]);
    r.v[Step + 3] = joined<kMask>(moved<6, To>(x), r.v[Step + 3]);
  }
  template <int To>
  static void add_bits(const uint8_t* p, W& r) {  // a plane of 1 bit
    constexpr uint8_t kMask = 1 << To;
    const I x = raw(p);
    r.v[0] = joined<kMask>(moved<0, To>(x), r.v[0]);
    r.v[1] = joined<kMask>(moved<1, To>(x), r.v[1]);
    r.v[2] = joined<kMask>(moved<2, To>(x), r.v[2]);
    r.v[3] = joined<kMask>(moved<3, To>(x), r.v[3]);
    r.v[4] = joined<kMask>(moved<4, To>(x), r.v[4]);
    r.v[5] = joined<kMask>(moved<5, To>(x), r.v[5]);
    r.v[6] = joined<kMask>(moved<6, To>(x), r.v[6]);
    r.v[7] = joined<kMask>(moved<7, To>(x), r.v[7]);
  }
  template <int Format>
  static W planes(const uint8_t* p) {
    constexpr int kBits = Codes<Format>::kBits, kLow = kBits > 4 ? 4 : 2;
    W r;
    if constexpr (kLow == 4) {
      const I low = _mm512_set1_epi8(15);
      for (int i = 0; i < 4; i++) {
        const I both = raw(p + 64 * i);
        r.v[2 * i] = _mm512_and_si512(both, low);
        r.v[2 * i + 1] = _mm512_and_si512(moved<4, 0>(both), low);
      }
    } else {
      for (int i = 0; i < 8; i++) r.v[i] = _mm512_setzero_si512();
      add_pairs<0, 0>(p, r);
      add_pairs<0, 4>(p, r);
    }
    const uint8_t* high = p + 64 * kLow;
    if constexpr (kBits == 6) {
      add_pairs<4, 0>(high, r);
      add_pairs<4, 4>(high, r);
    }
    if constexpr (kBits % 2) add_bits<kLow>(high, r);
    return r;
  }
  // Unsigned codes, 4 k to a vector, k ascending.
  template <int Format>
  static W decode(const uint8_t* p, Lookup table) {
    W r;
    if constexpr (!Codes<Format>::kBytes && Codes<Format>::kBits != 4) {
      r = planes<Format>(p);
      for (int i = 0; i < 8; i++) r.v[i] = number<Format>(r.v[i], table);
      return r;
    }
    if (Codes<Format>::kBytes) {
      for (int i = 0; i < 8; i++) r.v[i] = _mm512_loadu_si512(p + 64 * i);
    } else {
      const I low = _mm512_set1_epi8(15);
      for (int i = 0; i < 4; i++) {
        const I both = _mm512_loadu_si512(p + 64 * i);
        r.v[2 * i] = number<Format>(_mm512_and_si512(both, low), table);
        r.v[2 * i + 1] = number<Format>(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), table);
      }
    }
    return r;
  }
  static I four(const int8_t* a) {
    int32_t bytes;
    memcpy(&bytes, a, 4);
    return _mm512_set1_epi32(bytes);
  }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};

}  // namespace
}  // namespace hetero
