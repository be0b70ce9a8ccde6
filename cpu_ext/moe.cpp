#include "moe.h"

#include <stdexcept>

#include "pack.h"

namespace hetero {
namespace {

Layout checked_layout(const ExpertsConfig& c, int64_t n, int64_t k) {
  Layout layout;
  if (!make_layout(c.format, c.group, n, k, &layout))
    throw std::invalid_argument("no such format, group or shape");
  return layout;
}

}  // namespace

Experts::Experts(const ExpertsConfig& config, IsaChoice isa)
    : config_(config),
      isa_(isa),
      quantised_(config.format != kF32 && config.format != kBf16),
      mats_(config.act.has_gate ? 2 : 1),
      up_(checked_layout(config, config.intermediate, config.hidden)),
      down_(checked_layout(config, config.hidden, config.intermediate)) {
  down_offset_ = mats_ * packed_bytes(up_);
  bias_offset_ = down_offset_ + packed_bytes(down_);
  expert_bytes_ = expert_bytes(config);
  arena_ = Arena(static_cast<size_t>(nbytes()));
}

int64_t Experts::expert_bytes(const ExpertsConfig& c) {
  return hetero::expert_bytes(checked_layout(c, c.intermediate, c.hidden),
                              checked_layout(c, c.hidden, c.intermediate), c.act.has_gate != 0, c.has_bias);
}

void Experts::put(Context& context, int64_t expert, Part part, const void* data, DType type,
                  int64_t row_stride, int64_t col_stride) {
  uint8_t* base = arena_.data() + expert * expert_bytes_;
  if (part >= kGateBias) {
    const int64_t n = part == kDownBias ? config_.hidden : config_.intermediate;
    widen(data, type, n, row_stride, const_cast<float*>(bias(expert, part)));
    return;
  }
  struct Job {
    const Layout* layout;
    Source source;
    uint8_t* out;
    int64_t stride;
    std::atomic<int32_t> status;
  } job = {};
  job.layout = part == kDown ? &down_ : &up_;
  job.source = {data, static_cast<int32_t>(type), row_stride, col_stride};
  job.stride = job.layout->block_bytes * (part == kDown ? 1 : mats_);
  job.out = base + (part == kDown ? down_offset_ : part == kUp ? (mats_ - 1) * up_.block_bytes : 0);
  const Phase phase = {block_count(*job.layout),
                       [](void* ctx, int64_t block, int) {
                         Job& j = *static_cast<Job*>(ctx);
                         const PackStatus status =
                             pack_block(*j.layout, block, j.source, j.out + block * j.stride);
                         if (status != kPackOk) j.status.store(status, std::memory_order_relaxed);
                       },
                       &job};
  {
    std::lock_guard<std::mutex> hold(context.lock);
    context.pool->run(&phase, 1);
  }
  if (job.status == kPackNotFinite) throw std::invalid_argument("a weight is NaN or infinite");
  if (job.status == kPackOverflow) throw std::invalid_argument("a weight is too large for the format");
}

const float* Experts::bias(int64_t e, Part part) const {
  if (!config_.has_bias) return nullptr;
  const float* all = reinterpret_cast<const float*>(expert(e) + bias_offset_);
  if (part == kGateBias) return all;
  if (part == kUpBias) return all + (mats_ - 1) * config_.intermediate;
  return all + mats_ * config_.intermediate;
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

}  // namespace hetero
