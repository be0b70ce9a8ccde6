// The routed experts of one MoE block as one operator: gate and up, activation, down, weighted sum.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "pool.h"
#include "rows.h"
#include "weights.h"
#include "workspace.h"

namespace hetero {

// Calls of each kernel: one per (expert, projection) of a step. Read and reset at any time.
struct KernelCounters {
  std::atomic<uint64_t> calls[kFormats][kRowClasses] = {};
};

// An instruction set as it can be used on this machine: its table and the counters of its kernels.
struct IsaChoice {
  const IsaTable* table;
  KernelCounters* counters;
};

// The kernel of experts that have at most `rows` rows in a step, and where its calls are counted.
struct Band {
  int64_t rows;
  const Kernel* kernel;
  std::atomic<uint64_t>* calls;
};

// Bands by ascending rows; the last one takes all that is left. Steps of at most kExactRows tokens use
// `exact`, which holds no bulk kernel.
struct Plan {
  std::vector<Band> exact, large;
};

// Up to 4 rows GEMV, else GEMM (exact) or bulk (large), all of one instruction set.
Plan default_plan(const IsaChoice& isa, int32_t format);

// Sizes of the workspace and of what a thread takes at a time.
struct Tuning {
  int64_t wave_bytes = 64ll << 20;    // results of down that wait for their sum
  int64_t store_bytes = 160ll << 20;  // activations of one pass over the tokens
  int64_t strip_blocks = 0;           // blocks of a strip of down for few tokens; 0: by the number of threads
};

// One pool and one workspace for all operators of the process, passed to every step.
struct Context {
  explicit Context(int threads) : pool(new Pool(std::vector<Seat>(static_cast<size_t>(threads)))) {}
  ~Context() { delete pool; }
  std::mutex lock;  // held during a step, a change of the pool, and a fork
  std::mutex swap;  // held while `pool` is exchanged or looked at from beside a step; never for long
  Pool* pool;
  Workspace workspace;
  Tuning tuning;
};

class Experts {
 public:
  Experts(const ExpertsConfig& config, const Placement& placement, IsaChoice isa,
          const Arena* memory = nullptr)
      : config_(config), weights_(config, placement, memory) {
    set_isa(isa);
  }

  const ExpertsConfig& config() const { return config_; }
  // The packed bytes serve every instruction set, so another may take over between steps, with its own plan.
  void set_isa(IsaChoice isa) {
    isa_ = isa;
    up_plan_ = default_plan(isa, config_.format);
    down_plan_ = default_plan(isa, config_.down_format);
  }
  // Kernels of gate and up, and of down.
  void set_plan(Plan up, Plan down) {
    up_plan_ = std::move(up);
    down_plan_ = std::move(down);
  }
  Weights& weights() { return weights_; }

  // out [tokens, hidden] float32 = sum over slots, in slot order, of weight * expert(x). x [tokens, hidden].
  void forward(Context& context, const void* x, DType type, const Routing& routing, const float* weights,
               float* out) const;
  // out [tokens, slots, 2 * intermediate] (gate, then up; up alone without a gate), biases included.
  void gate_up(Context& context, const void* x, DType type, const Routing& routing, float* out) const;
  // h [tokens, slots, intermediate] -> out [tokens, slots, hidden], bias included, not weighted.
  void down(Context& context, const void* h, DType type, const Routing& routing, float* out) const;
  // forward in two halves, for experts that are here one group after the other. pairs: what each expert makes
  // of its tokens, not weighted, into out [tokens, slots, hidden]; rows of skipped ids keep what they hold.
  // sum: out [tokens, hidden] from such results of all groups; with the ids of the whole step, and kernels
  // chosen as in it, the same bits as forward.
  void pairs(Context& context, const void* x, DType type, const Routing& routing, float* out) const;
  void sum(Context& context, const float* results, const Routing& routing, const float* weights,
           float* out) const;

 private:
  friend struct Step;
  enum class Mode { kWhole, kGateUp, kDown, kPairs, kSum };
  void run(Context& context, Mode mode, const void* x, DType type, const Routing& routing,
           const float* weights, float* out) const;

  ExpertsConfig config_;
  IsaChoice isa_ = {};
  Plan up_plan_, down_plan_;
  Weights weights_;
};

}  // namespace hetero
