// AVX-512 F/BW/VL/DQ without VNNI and BF16: also the float kernels, activations and quantisation of the
// tables that have those.
#include "act.h"
#include "avx512_policy.h"
#include "exact.h"
#include "tables.h"

namespace hetero {
namespace {

struct Plain : Avx512 {
  // As on AVX2 (see there for the bounds), with the sign of weights as a mask.
  template <int Format, int First, int Count>
  static I dot(const W& w, const int8_t* a, int32_t sum) {
    const I ones = _mm512_set1_epi16(1);
    if constexpr (!sums_fit<Format>(1)) {
      const I flip = _mm512_set1_epi8(static_cast<char>(0x80));
      I total = _mm512_setzero_si512();
      for (int i = First; i < First + Count; i++) {
        const I value = _mm512_xor_si512(w.v[i], flip), x = four(a + 4 * i);
        const I with_sign = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(value), _mm512_setzero_si512(), x);
        const I product = _mm512_maddubs_epi16(_mm512_abs_epi8(value), with_sign);
        total = _mm512_add_epi32(total, _mm512_madd_epi16(product, ones));
      }
      constexpr int32_t kRest = 128 - Codes<Format>::kZero;
      return kRest ? _mm512_add_epi32(total, _mm512_set1_epi32(kRest * sum)) : total;
    } else {
      I even = _mm512_maddubs_epi16(w.v[First], four(a + 4 * First));
      I odd = _mm512_maddubs_epi16(w.v[First + 1], four(a + 4 * First + 4));
      for (int i = First + 2; i < First + Count; i += 2) {
        even = _mm512_add_epi16(even, _mm512_maddubs_epi16(w.v[i], four(a + 4 * i)));
        odd = _mm512_add_epi16(odd, _mm512_maddubs_epi16(w.v[i + 1], four(a + 4 * i + 4)));
      }
      static_assert(sums_fit<Format>(Count / 2), "16-bit sums saturate");
      const I total = sums_fit<Format>(Count)
                          ? _mm512_madd_epi16(_mm512_add_epi16(even, odd), ones)
                          : _mm512_add_epi32(_mm512_madd_epi16(even, ones), _mm512_madd_epi16(odd, ones));
      constexpr int32_t kZero = Codes<Format>::kZero;
      return kZero ? _mm512_add_epi32(total, _mm512_set1_epi32(-kZero * sum)) : total;
    }
  }

  static int32_t amax_bits(const float* p) {
    const I mask = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_and_si512(bits(load(p)), mask), _mm512_and_si512(bits(load(p + 16)), mask)));
  }
  static int32_t codes(const float* p, float inverse, int8_t* q) {
    const F scale = set1(inverse);
    const I low = _mm512_cvtps_epi32(mul(load(p), scale));
    const I high = _mm512_cvtps_epi32(mul(load(p + 16), scale));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(high));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
  }
};

using P = Plain;
template <int Format>
constexpr GemmFn gemv = quant_kernel<P, Format, 4>;
template <int Format>
constexpr GemmFn gemm = quant_kernel<P, Format, 8>;
template <int Format>
constexpr GemmFn fp8_gemv = fp8_kernel<P, Format, 4, 2>;
template <int Format>
constexpr GemmFn fp8_gemm = fp8_kernel<P, Format, 8, 1>;

const IsaTable kUnit = {
    "avx512",
    {{{float_kernel<P, kF32>, "f32.avx512.gemv"},
      {float_kernel<P, kF32>, "f32.avx512.gemm"},
      {float_kernel<P, kF32>, "f32.avx512.gemm"}},
     {{float_kernel<P, kBf16>, "bf16.avx512.gemv"},
      {float_kernel<P, kBf16>, "bf16.avx512.gemm"},
      {float_kernel<P, kBf16>, "bf16.avx512.gemm"}},
     {{quant_kernel<P, kInt8, 4>, "int8.avx512.gemv"},
      {quant_kernel<P, kInt8, 8>, "int8.avx512.gemm"},
      {quant_kernel<P, kInt8, 8>, "int8.avx512.gemm"}},
     {{quant_kernel<P, kInt4, 4>, "int4.avx512.gemv"},
      {quant_kernel<P, kInt4, 8>, "int4.avx512.gemm"},
      {quant_kernel<P, kInt4, 8>, "int4.avx512.gemm"}},
     {{quant_kernel<P, kInt4a, 4>, "int4a.avx512.gemv"},
      {quant_kernel<P, kInt4a, 8>, "int4a.avx512.gemm"},
      {quant_kernel<P, kInt4a, 8>, "int4a.avx512.gemm"}},
     HETERO_FP8_ROW("fp8", "avx512", kFp8),
     {{quant_kernel<P, kMxfp4, 4>, "mxfp4.avx512.gemv"},
      {quant_kernel<P, kMxfp4, 8>, "mxfp4.avx512.gemm"},
      {quant_kernel<P, kMxfp4, 8>, "mxfp4.avx512.gemm"}},
     {{quant_kernel<P, kNvfp4, 4>, "nvfp4.avx512.gemv"},
      {quant_kernel<P, kNvfp4, 8>, "nvfp4.avx512.gemm"},
      {quant_kernel<P, kNvfp4, 8>, "nvfp4.avx512.gemm"}},
     HETERO_KEPT_FORMATS("avx512"),
     HETERO_FP8_ROW("fp8_row", "avx512", kFp8Row)},
    act_kernel<P>,
    quantize_kernel<P>,
    axpy_kernel<P>,
    round_kernel,
};

}  // namespace

const IsaTable* avx512_plain_unit() { return &kUnit; }

}  // namespace hetero
