#include "moe.h"

namespace hetero {

Plan default_plan(const IsaChoice& isa, int32_t format) {
  const auto band = [&](int64_t rows, RowClass c) {
    return Band{rows, &isa.table->gemm[format][c], &isa.counters->calls[format][c]};
  };
  return {{band(kGemvRows, kGemv), band(INT64_MAX, kGemm)}, {band(kGemvRows, kGemv), band(INT64_MAX, kBulk)}};
}

void Experts::forward(Context& context, const void* x, DType type, const Routing& routing,
                      const float* weights, float* out) const {
  run(context, Mode::kWhole, x, type, routing, weights, out);
}

void Experts::gate_up(Context& context, const void* x, DType type, const Routing& routing, float* out) const {
  run(context, Mode::kGateUp, x, type, routing, nullptr, out);
}

void Experts::down(Context& context, const void* h, DType type, const Routing& routing, float* out) const {
  run(context, Mode::kDown, h, type, routing, nullptr, out);
}

void Experts::pairs(Context& context, const void* x, DType type, const Routing& routing, float* out) const {
  run(context, Mode::kPairs, x, type, routing, nullptr, out);
}

void Experts::sum(Context& context, const float* results, const Routing& routing, const float* weights,
                  float* out) const {
  run(context, Mode::kSum, results, DType::kF32, routing, weights, out);
}

}  // namespace hetero
