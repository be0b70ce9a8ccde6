// AVX2 with FMA and F16C: a block in two halves of 8 rows.
#include <immintrin.h>

#include "act.h"
#include "exact.h"
#include "tables.h"

namespace hetero {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kGemvBlocks = 2, kMaxSums = 4;
  static constexpr int kFloatRows = 2, kFloatUnits = 2;
  using F = __m256;
  using I = __m256i;
  struct W {
    __m256i v[8];
  };

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F abs(F a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
  static F where_greater(F a, F b, F yes, F no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
  }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I bits(F a) { return _mm256_castps_si256(a); }
  static F from_bits(I a) { return _mm256_castsi256_ps(a); }
  static I set1i(int32_t x) { return _mm256_set1_epi32(x); }
  static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
  static I subi(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I half_down(I a) { return _mm256_srai_epi32(a, 1); }
  static I shift_to_exponent(I a) { return _mm256_slli_epi32(a, 23); }

  static F half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I raw(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static F bf_even(const uint8_t* p) { return from_bits(_mm256_slli_epi32(raw(p), 16)); }
  static F bf_odd(const uint8_t* p) {
    return from_bits(_mm256_and_si256(raw(p), _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }

  // int8 codes become signed values; int4 codes stay unsigned.
  template <int Format>
  static W decode(const uint8_t* p) {
    W r;
    if (Format == kInt8) {
      const I flip = _mm256_set1_epi8(static_cast<char>(0x80));
      for (int i = 0; i < 8; i++) r.v[i] = _mm256_xor_si256(raw(p + 64 * i), flip);
    } else {
      const I low = _mm256_set1_epi8(15);
      for (int i = 0; i < 4; i++) {
        const I both = raw(p + 64 * i);
        r.v[2 * i] = _mm256_and_si256(both, low);
        r.v[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      }
    }
    return r;
  }
  static I four(const int8_t* a) {
    int32_t bytes;
    memcpy(&bytes, a, 4);
    return _mm256_set1_epi32(bytes);
  }
  // vpmaddubsw saturates at 32767. int4: the sums of a whole group stay below 8 * 2 * 15 * 127 = 30480. int8:
  // |w| times the activation with the sign of w stays below 2 * 128 * 127 = 32512, so each step is widened.
  template <int Format>
  static I dot(const W& w, const int8_t* a, int32_t sum) {
    const I ones = _mm256_set1_epi16(1);
    if (Format == kInt8) {
      I total = _mm256_setzero_si256();
      for (int i = 0; i < 8; i++) {
        const I product =
            _mm256_maddubs_epi16(_mm256_abs_epi8(w.v[i]), _mm256_sign_epi8(four(a + 4 * i), w.v[i]));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(product, ones));
      }
      return total;
    }
    I even = _mm256_maddubs_epi16(w.v[0], four(a));
    I odd = _mm256_maddubs_epi16(w.v[1], four(a + 4));
    for (int i = 2; i < 8; i += 2) {
      even = _mm256_add_epi16(even, _mm256_maddubs_epi16(w.v[i], four(a + 4 * i)));
      odd = _mm256_add_epi16(odd, _mm256_maddubs_epi16(w.v[i + 1], four(a + 4 * i + 4)));
    }
    const I total = _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
    return Format == kInt4 ? _mm256_add_epi32(total, _mm256_set1_epi32(-8 * sum)) : total;
  }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

  static int32_t amax_bits(const float* p) {
    const I mask = _mm256_set1_epi32(0x7fffffff);
    I most = _mm256_setzero_si256();
    for (int i = 0; i < kActGroup; i += 8)
      most = _mm256_max_epi32(most, _mm256_and_si256(bits(load(p + i)), mask));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
  }
  static int32_t codes(const float* p, float inverse, int8_t* q) {
    const F scale = set1(inverse);
    I v[4], sum = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
      v[i] = _mm256_cvtps_epi32(mul(load(p + 8 * i), scale));
      sum = _mm256_add_epi32(sum, v[i]);
    }
    // The packs work within 128-bit lanes: the permutation puts the dwords back in order.
    const I words = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const I ordered = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<I*>(q), ordered);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
  }
};

using P = Avx2;
const IsaTable kTable = {
    "avx2",
    {{{float_kernel<P, kF32>, "f32.avx2.gemv"},
      {float_kernel<P, kF32>, "f32.avx2.gemm"},
      {float_kernel<P, kF32>, "f32.avx2.gemm"}},
     {{float_kernel<P, kBf16>, "bf16.avx2.gemv"},
      {float_kernel<P, kBf16>, "bf16.avx2.gemm"},
      {float_kernel<P, kBf16>, "bf16.avx2.gemm"}},
     {{quant_kernel<P, kInt8, 4>, "int8.avx2.gemv"},
      {quant_kernel<P, kInt8, 4>, "int8.avx2.gemm"},
      {quant_kernel<P, kInt8, 4>, "int8.avx2.gemm"}},
     {{quant_kernel<P, kInt4, 4>, "int4.avx2.gemv"},
      {quant_kernel<P, kInt4, 4>, "int4.avx2.gemm"},
      {quant_kernel<P, kInt4, 4>, "int4.avx2.gemm"}},
     {{quant_kernel<P, kInt4a, 4>, "int4a.avx2.gemv"},
      {quant_kernel<P, kInt4a, 4>, "int4a.avx2.gemm"},
      {quant_kernel<P, kInt4a, 4>, "int4a.avx2.gemm"}}},
    act_kernel<P>,
    quantize_kernel<P>,
    axpy_kernel<P>,
};

}  // namespace

const IsaTable* avx2_table() { return &kTable; }

}  // namespace hetero
