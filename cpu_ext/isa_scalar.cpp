// Kernels in portable C: what every other instruction set is compared with, and what runs where there is
// none.
#include "act.h"
#include "exact.h"
#include "scalar_policy.h"
#include "tables.h"

namespace hetero {
namespace {

struct Portable : Scalar {
  static int32_t amax_bits(const float* p) {
    uint32_t most = 0;
    for (int i = 0; i < kActGroup; i++) {
      const uint32_t bits = float_to_bits(p[i]) & 0x7fffffffu;
      if (bits > most) most = bits;
    }
    return static_cast<int32_t>(most);
  }
  static int32_t codes(const float* p, float inverse, int8_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < kActGroup; i++) {
      const int32_t code = static_cast<int32_t>(p[i] * inverse + kRoundMagic - kRoundMagic);
      q[i] = static_cast<int8_t>(code);
      sum += code;
    }
    return sum;
  }
};

using P = Portable;
template <int Format>
constexpr GemmFn gemv = quant_kernel<P, Format, 4>;
template <int Format>
constexpr GemmFn gemm = quant_kernel<P, Format, 4>;
template <int Format>
constexpr GemmFn fp8_gemv = fp8_kernel<P, Format, 4, 1>;
template <int Format>
constexpr GemmFn fp8_gemm = fp8_kernel<P, Format, 4, 1>;

const IsaTable kTable = {
    "scalar",
    {{{float_kernel<P, kF32>, "f32.scalar.gemv"},
      {float_kernel<P, kF32>, "f32.scalar.gemm"},
      {float_kernel<P, kF32>, "f32.scalar.gemm"}},
     {{float_kernel<P, kBf16>, "bf16.scalar.gemv"},
      {float_kernel<P, kBf16>, "bf16.scalar.gemm"},
      {float_kernel<P, kBf16>, "bf16.scalar.gemm"}},
     {{quant_kernel<P, kInt8, 4>, "int8.scalar.gemv"},
      {quant_kernel<P, kInt8, 4>, "int8.scalar.gemm"},
      {quant_kernel<P, kInt8, 4>, "int8.scalar.gemm"}},
     {{quant_kernel<P, kInt4, 4>, "int4.scalar.gemv"},
      {quant_kernel<P, kInt4, 4>, "int4.scalar.gemm"},
      {quant_kernel<P, kInt4, 4>, "int4.scalar.gemm"}},
     {{quant_kernel<P, kInt4a, 4>, "int4a.scalar.gemv"},
      {quant_kernel<P, kInt4a, 4>, "int4a.scalar.gemm"},
      {quant_kernel<P, kInt4a, 4>, "int4a.scalar.gemm"}},
     HETERO_FP8_ROW("fp8", "scalar", kFp8),
     {{quant_kernel<P, kMxfp4, 4>, "mxfp4.scalar.gemv"},
      {quant_kernel<P, kMxfp4, 4>, "mxfp4.scalar.gemm"},
      {quant_kernel<P, kMxfp4, 4>, "mxfp4.scalar.gemm"}},
     {{quant_kernel<P, kNvfp4, 4>, "nvfp4.scalar.gemv"},
      {quant_kernel<P, kNvfp4, 4>, "nvfp4.scalar.gemm"},
      {quant_kernel<P, kNvfp4, 4>, "nvfp4.scalar.gemm"}},
     HETERO_KEPT_FORMATS("scalar"),
     HETERO_FP8_ROW("fp8_row", "scalar", kFp8Row)},
    act_kernel<P>,
    quantize_kernel<P>,
    axpy_kernel<P>,
    round_kernel,
};

}  // namespace

const IsaTable* scalar_table() { return &kTable; }

}  // namespace hetero
