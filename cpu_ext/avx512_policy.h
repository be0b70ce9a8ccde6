// The policy of exact.h and act.h on AVX-512 F/BW/VL/DQ, without the integer dot, which each unit adds.
#pragma once

#include <immintrin.h>
#include <string.h>

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

  // Unsigned codes, 4 k to a vector, k ascending.
  template <int Format>
  static W decode(const uint8_t* p) {
    W r;
    if (Format == kInt8) {
      for (int i = 0; i < 8; i++) r.v[i] = _mm512_loadu_si512(p + 64 * i);
    } else {
      const I low = _mm512_set1_epi8(15);
      for (int i = 0; i < 4; i++) {
        const I both = _mm512_loadu_si512(p + 64 * i);
        r.v[2 * i] = _mm512_and_si512(both, low);
        r.v[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
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
