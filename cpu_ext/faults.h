// Faults and delays that tests ask of the hand-off's worker.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace hetero {

inline int64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

inline void sleep_for(int64_t ns) {
  const timespec t = {ns / 1'000'000'000, ns % 1'000'000'000};
  nanosleep(&t, nullptr);
}

// Where a fault strikes, in the order in which the worker gets there.
enum class Point : int32_t { kSeen, kWork, kComputed, kPublish, kPublished };
enum class FaultKind : int32_t { kThrow, kStall, kDie };

struct Fault {
  Point point;
  FaultKind kind;
  int64_t lane, layer;  // -1: any
  int64_t ns;           // of a stall
};

// Thrown by a thread that is to end without a word, as if it had been killed.
struct Died {};

class Faults {
 public:
  // Strikes once, at the next layer that fits.
  void add(const Fault& fault) {
    std::lock_guard<std::mutex> hold(lock_);
    waiting_.push_back(fault);
    any_.store(true);
  }
  // Random delays up to `ns` at every point.
  void jitter(int64_t ns) { jitter_.store(ns); }

  void strike(Point point, int64_t lane, int64_t layer, uint64_t* random) {
    if (const int64_t most = jitter_.load(std::memory_order_relaxed); most > 0) delay(random, most);
    if (!any_.load(std::memory_order_relaxed)) return;
    Fault fault;
    if (!take(point, lane, layer, &fault)) return;
    if (fault.kind == FaultKind::kThrow) throw std::runtime_error("a fault that a test asked for");
    if (fault.kind == FaultKind::kDie) throw Died();
    sleep_for(fault.ns);
  }

 private:
  bool take(Point point, int64_t lane, int64_t layer, Fault* found) {
    std::lock_guard<std::mutex> hold(lock_);
    for (size_t i = 0; i < waiting_.size(); ++i) {
      const Fault f = waiting_[i];
      if (f.point != point || (f.lane >= 0 && f.lane != lane) || (f.layer >= 0 && f.layer != layer)) continue;
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
      any_.store(!waiting_.empty());
      *found = f;
      return true;
    }
    return false;
  }

  static void delay(uint64_t* random, int64_t most) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    const uint64_t r = *random >> 33;
    if (r % 4 == 0) sched_yield();
    if (r % 4 != 1) return;
    const int64_t until = monotonic_ns() + static_cast<int64_t>((r >> 2) % static_cast<uint64_t>(most));
    while (monotonic_ns() < until) __builtin_ia32_pause();
  }

  std::mutex lock_;
  std::atomic<bool> any_{false};
  std::atomic<int64_t> jitter_{0};
  std::vector<Fault> waiting_;
};

}  // namespace hetero
