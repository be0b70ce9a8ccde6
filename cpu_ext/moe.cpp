#include "moe.h"

namespace hetero {

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

}  // namespace hetero
