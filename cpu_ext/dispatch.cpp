#include "dispatch.h"

#include <stdexcept>

#include "tables.h"

namespace hetero {
namespace {

constexpr const char* kNames[kIsas] = {"scalar", "avx2", "avx512", "amx"};
constexpr const char* kTwin = "amx_twin";

// Executed calls belong to the process: kernels of the same name add up over all operators.
KernelCounters counters[kIsas + 1];

const IsaTable* table_of(int isa) {
  return isa == kIsas ? amx_twin_table() : select_table(static_cast<Isa>(isa), detect_features());
}

}  // namespace

std::vector<std::string> isa_names(bool with_twin) {
  std::vector<std::string> names;
  for (int i = 0; i < kIsas; ++i) {
    if (table_of(i) != nullptr) names.push_back(kNames[i]);
  }
  if (with_twin) names.push_back(kTwin);
  return names;
}

std::string best_isa_name() { return isa_names(false).back(); }

IsaChoice choose_isa(const std::string& name) {
  for (int i = 0; i <= kIsas; ++i) {
    if (name != (i == kIsas ? kTwin : kNames[i])) continue;
    const IsaTable* table = table_of(i);
    if (table != nullptr) return {table, &counters[i]};
    char missing[256];
    missing_features(static_cast<Isa>(i), detect_features(), missing, sizeof missing);
    throw std::runtime_error(missing);
  }
  throw std::invalid_argument(name);
}

std::map<std::string, uint64_t> kernel_counts() {
  std::map<std::string, uint64_t> counts;
  for (int i = 0; i <= kIsas; ++i) {
    for (int f = 0; f < kFormats; ++f) {
      for (int c = 0; c < kRowClasses; ++c) {
        const uint64_t calls = counters[i].calls[f][c].load(std::memory_order_relaxed);
        if (calls > 0) counts[table_of(i)->gemm[f][c].name] += calls;
      }
    }
  }
  return counts;
}

void reset_kernel_counts() {
  for (auto& isa : counters) {
    for (auto& format : isa.calls) {
      for (auto& calls : format) calls.store(0, std::memory_order_relaxed);
    }
  }
}

}  // namespace hetero
