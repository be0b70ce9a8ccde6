// A pool of threads that runs steps. A step is a list of phases; a phase is a number of chunks that may run
// on any thread in any order; a phase begins when every chunk of the one before it is done.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

namespace hetero {

struct Phase {
  int64_t chunks;
  void (*fn)(void* ctx, int64_t chunk, int thread);
  void* ctx;
  // Where the work's memory lies: chunks [node_ends[i - 1], node_ends[i]) belong to node i of `nodes`, and
  // threads of that node come first. Null: chunks belong to nobody.
  const int64_t* node_ends = nullptr;
  int nodes = 0;
  // A node number: workers of other nodes stay away, unless that node has no thread. -1: all help.
  int only = -1;
};

// Where a thread sits: a node (numbers of the owner's choice, from 0) and the CPUs that it may run on.
struct Seat {
  int node = 0;
  std::vector<int> cpus;  // empty: anywhere
};

// Division of work: each phase gives every thread a contiguous share of its chunks beforehand. A thread works
// off its own share, then helps the others, those of its node first. A thread that the kernel has taken off
// its core therefore holds up at most the chunk that it is in.
//
// Contracts of memory order
//
// `now_` holds (epoch, phase), the tag of the phase in progress. `shares_[t].word` holds (tag, next chunk of
// t's share); a word with an older tag stands for "none taken yet", so nobody has to reset it between phases.
// A thread claims a chunk by a compare-and-swap of that word to (tag, next + 1). Between a successful claim
// and its count in `left_` the step cannot end, so what the caller wrote for this step is stable and visible.
//
// A thread without a claim may hold a stale tag at any time. Within its epoch nothing that it reads changes,
// and every share of a finished phase is used up. Between epochs run() first moves every word to the new
// epoch, then writes the ranges (release), then publishes: a stale thread that sees a new range has therefore
// also seen a new word, either by reading it, which tells it that its tag is old, or by its swap, which then
// fails.
//
// `left_` holds the chunks of the phase that are not yet counted as done and, from bit 32 on, the shares that
// are not yet counted as used up; these save threads from looking through all shares at the end of a phase. A
// thread counts for itself and takes its sums off `left_` (acq_rel) when it finds no more to claim. Whoever
// brings it to zero has acquired all other writes and publishes the next phase (release).
//
// Sleeping: a thread raises `sleepers`, reads `signal`, looks at now_ once more, then waits on `signal`.
// publish() stores now_, then reads `sleepers`. These four are seq_cst, so either the sleeper sees the new
// tag or the publisher sees the sleeper and changes `signal` before it wakes. Workers are woken a few at a
// time, and whoever wakes passes it on, so that no thread pays for all. The caller sleeps apart: it is woken
// at once, and alone when a step ends, since workers asleep may then sleep on.
class Pool {
 public:
  static constexpr int kMaxPhases = 7;

  // One seat a thread. The calling thread of run() takes the first: where that names CPUs, which must then be
  // no worker's, a caller found elsewhere is moved there before the step; its mask stays as it is, since it
  // has other work between steps. The others are workers, started at the first run.
  explicit Pool(std::vector<Seat> seats);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(seats_.size()); }
  int node_of(int thread) const { return seats_[static_cast<size_t>(thread)].node; }

  // Runs at most kMaxPhases phases and returns when all are done. The first exception of a chunk is rethrown
  // here; chunks not yet begun are then skipped. One caller at a time: the owner holds a lock.
  void run(const Phase* phases, int count);

  // Steps that are known to come soon, in all pools of the process: while above zero, workers that have
  // nothing to do spin for up to kSpinComingNs, giving their core to whoever wants it, and then sleep.
  static std::atomic<int> coming;
  // Keeps a thread that does little but call run() on the first seat; `mask` is its own from one call to the
  // next, empty at first, and what it falls back to where the seat names no CPUs that it may run on.
  void sit(std::vector<int>* mask) const;
  // Wakes workers that sleep, so that they are there when the next step comes. Any thread may call it.
  void rouse();

  const std::vector<Seat>& seats() const { return seats_; }
  // Changes whenever a thread begins a chunk. Any thread may call it.
  uint64_t progress() const;

  // In the child of a fork only this thread exists: forget the workers, start new ones when needed.
  // The owner calls it with its lock held across the fork, so no step is in flight.
  void after_fork_in_child();

 private:
  struct Start {
    Pool* pool;
    int thread;
  };
  struct alignas(64) Share {
    std::atomic<uint64_t> word{0};
    std::atomic<uint64_t> range[kMaxPhases] = {};  // first chunk, and the one behind the last
  };
  struct alignas(64) Sleep {
    std::atomic<uint32_t> signal{0};
    std::atomic<int32_t> sleepers{0};
  };
  // Threads that the chunks of some consecutive nodes are dealt to.
  struct Group {
    int node, last_node;  // its threads' own node, and the last whose chunks they are given
    std::vector<int> threads;
  };
  enum class Claim { kRan, kEmpty, kStale };

  static void* main(void* start);
  void start_workers();
  void stop_workers();
  void worker(int thread);
  void step_off() const;
  void deal(int phase);
  int64_t left_of(int phase) const;
  void complete(int phase);
  Claim claim(uint64_t tag, size_t share, int thread, int64_t* emptied);
  bool work(uint64_t tag, int thread);
  void execute(int phase, int64_t chunk, int thread) noexcept;
  void publish(uint64_t tag);
  bool is_for_workers(uint64_t tag) const;
  void wake(Sleep* sleep, int most);
  void wait_change(Sleep* sleep, uint64_t seen, int64_t spin_ns);

  const std::vector<Seat> seats_;
  std::vector<Group> groups_;            // by node; a node without threads belongs to the group before it
  std::vector<std::vector<int>> order_;  // thread -> shares in the order of helping, its own first
  std::vector<pthread_t> workers_;
  std::vector<Start> starts_;
  bool started_ = false;
  uint64_t epoch_ = 0;

  Phase phases_[kMaxPhases] = {};
  int phase_count_ = 0;
  std::exception_ptr error_;

  std::unique_ptr<Share[]> shares_;
  std::atomic<int> only_[kMaxPhases] = {};
  int shares_used_[kMaxPhases] = {};  // shares with chunks
  alignas(64) std::atomic<uint64_t> now_;
  alignas(64) std::atomic<int64_t> left_{0};
  Sleep worker_sleep_, caller_sleep_;
  std::atomic<uint64_t> alone_{0};  // chunks begun by a pool of one thread
  std::atomic<bool> failed_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace hetero
