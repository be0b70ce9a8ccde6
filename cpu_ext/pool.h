// A pool of threads that runs steps. A step is a list of phases; a phase is a number of chunks that may run
// on any thread in any order; a phase begins when every chunk of the one before it is done.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

namespace hetero {

struct Phase {
  int64_t chunks;
  void (*fn)(void* ctx, int64_t chunk, int thread);
  void* ctx;
};

// Contracts of memory order
//
// `ticket_` is the only word that threads race for: (epoch, phase, next chunk). A thread claims chunk `next`
// by a compare-and-swap to next + 1. Between a successful claim and the count in `done_` the step cannot end,
// so what the caller wrote for this step (phases_, the work itself) is stable and visible: the swap acquires,
// and every swap before it extends the release sequence of publish().
// A thread without a claim may hold a stale ticket at any time. All it reads then is chunks_, relaxed, and a
// swap against a stale ticket fails. So a thread that the kernel has taken off its core holds up nothing
// unless it has claimed a chunk: there is no barrier at which everybody must arrive.
// A finished chunk adds one to `done_` (acq_rel). Whoever completes the phase has therefore acquired every
// other chunk's writes and publishes the next phase (release), which hands all of them on.
//
// Sleeping: a thread raises sleepers_, reads signal_, looks at ticket_ once more, then waits on signal_.
// publish() stores ticket_, then reads sleepers_. These four are seq_cst, so either the sleeper sees the new
// ticket or the publisher sees the sleeper and changes signal_ before it wakes.
class Pool {
 public:
  static constexpr int kMaxPhases = 8;

  // The calling thread of run() is one of `threads`; threads - 1 workers are started at the first run.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs at most kMaxPhases phases and returns when all are done. The first exception of a chunk is rethrown
  // here; chunks not yet begun are then skipped. One caller at a time: the owner holds a lock.
  void run(const Phase* phases, int count);

  // In the child of a fork only this thread exists: forget the workers, start new ones when needed.
  // The owner calls it with its lock held across the fork, so no step is in flight.
  void after_fork_in_child();

 private:
  struct Start {
    Pool* pool;
    int thread;
  };
  static void* main(void* start);
  void start_workers();
  void stop_workers();
  void worker(int thread);
  bool claim_one(uint64_t ticket, int thread);
  void execute(int phase, int64_t chunk, int thread) noexcept;
  void publish(uint64_t ticket);
  void wait_change(uint64_t seen, int64_t spin_ns);

  const int threads_;
  std::vector<pthread_t> workers_;
  std::vector<Start> starts_;
  bool started_ = false;
  uint64_t epoch_ = 0;

  Phase phases_[kMaxPhases] = {};
  int phase_count_ = 0;
  std::exception_ptr error_;

  alignas(64) std::atomic<uint64_t> ticket_;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> signal_{0};
  std::atomic<int32_t> sleepers_{0};
  alignas(64) std::atomic<int64_t> chunks_[kMaxPhases];
  std::atomic<bool> failed_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace hetero
