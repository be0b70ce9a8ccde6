// The quantised formats by vpdpbusd: unsigned codes times signed activations.
#include "avx512_policy.h"
#include "exact.h"
#include "tables.h"

namespace hetero {
namespace {

struct Vnni : Avx512 {
  template <int Format, int First, int Count>
  static I dot(const W& w, const int8_t* a, int32_t sum) {
    constexpr int32_t kZero = Codes<Format>::kZero;
    I total = kZero ? _mm512_set1_epi32(-kZero * sum) : _mm512_setzero_si512();
    for (int i = First; i < First + Count; i++) total = _mm512_dpbusd_epi32(total, w.v[i], four(a + 4 * i));
    return total;
  }
};

using P = Vnni;
const Kernel kNone = {nullptr, nullptr};
const IsaTable kUnit = {
    "avx512_vnni",
    {{kNone, kNone, kNone},
     {kNone, kNone, kNone},
     {{quant_kernel<P, kInt8, 4>, "int8.avx512_vnni.gemv"},
      {quant_kernel<P, kInt8, 8>, "int8.avx512_vnni.gemm"},
      {quant_kernel<P, kInt8, 8>, "int8.avx512_vnni.gemm"}},
     {{quant_kernel<P, kInt4, 4>, "int4.avx512_vnni.gemv"},
      {quant_kernel<P, kInt4, 8>, "int4.avx512_vnni.gemm"},
      {quant_kernel<P, kInt4, 8>, "int4.avx512_vnni.gemm"}},
     {{quant_kernel<P, kInt4a, 4>, "int4a.avx512_vnni.gemv"},
      {quant_kernel<P, kInt4a, 8>, "int4a.avx512_vnni.gemm"},
      {quant_kernel<P, kInt4a, 8>, "int4a.avx512_vnni.gemm"}},
     {kNone, kNone, kNone},
     {{quant_kernel<P, kMxfp4, 4>, "mxfp4.avx512_vnni.gemv"},
      {quant_kernel<P, kMxfp4, 8>, "mxfp4.avx512_vnni.gemm"},
      {quant_kernel<P, kMxfp4, 8>, "mxfp4.avx512_vnni.gemm"}},
     {{quant_kernel<P, kNvfp4, 4>, "nvfp4.avx512_vnni.gemv"},
      {quant_kernel<P, kNvfp4, 8>, "nvfp4.avx512_vnni.gemm"},
      {quant_kernel<P, kNvfp4, 8>, "nvfp4.avx512_vnni.gemm"}}},
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

const IsaTable* avx512_vnni_unit() { return &kUnit; }

}  // namespace hetero
