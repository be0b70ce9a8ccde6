#include "pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace hetero {
namespace {

constexpr int kPhaseBits = 4;
constexpr int kNextBits = 24;
constexpr uint64_t kDone = (1u << kPhaseBits) - 1;  // phase of a tag when no step is in flight
constexpr int64_t kMaxChunks = int64_t{1} << kNextBits;
static_assert(Pool::kMaxPhases < kDone, "phases must fit their bits");

// A waiting thread spins this long, then sleeps. In a step the next phase is usually microseconds away;
// after a step a short linger catches a step that follows at once.
constexpr int64_t kSpinInStepNs = 50'000;
constexpr int64_t kSpinIdleNs = 20'000;
// When the next step is known to come: a GPU's part of a layer takes tens or hundreds of microseconds, and
// waking many sleepers costs as much.
constexpr int64_t kSpinComingNs = 20'000'000;
// Threads that one thread wakes before it goes to work. Measured with 16 threads: 1 or 2 make the last late,
// all at once keep the first from its work.
constexpr int kWakeAtOnce = 4;

// Tags have the 40 bits that a word leaves them; at 2,000 steps a second the epoch wraps after a year.
constexpr uint64_t make_tag(uint64_t epoch, uint64_t phase) {
  return (epoch << kPhaseBits | phase) & (~uint64_t{0} >> kNextBits);
}
constexpr uint64_t phase_of(uint64_t tag) { return tag & kDone; }
constexpr uint64_t make_word(uint64_t tag, int64_t next) {
  return tag << kNextBits | static_cast<uint64_t>(next);
}
constexpr uint64_t tag_of(uint64_t word) { return word >> kNextBits; }
constexpr int64_t next_of(uint64_t word) { return static_cast<int64_t>(word & (kMaxChunks - 1)); }

constexpr uint64_t make_range(int64_t begin, int64_t end) {
  return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
}
constexpr int64_t begin_of(uint64_t range) { return static_cast<int64_t>(range >> 32); }
constexpr int64_t end_of(uint64_t range) { return static_cast<int64_t>(range & 0xffffffffu); }

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void futex(std::atomic<uint32_t>* word, int op, uint32_t value) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// A set of CPUs as the kernel takes it.
class CpuSet {
 public:
  explicit CpuSet(const std::vector<int>& cpus) : bytes_(CPU_ALLOC_SIZE(kMost)), set_(CPU_ALLOC(kMost)) {
    if (set_ == nullptr) throw std::bad_alloc();
    CPU_ZERO_S(bytes_, set_);
    for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes_, set_);
  }
  ~CpuSet() { CPU_FREE(set_); }
  CpuSet(const CpuSet&) = delete;
  CpuSet& operator=(const CpuSet&) = delete;
  cpu_set_t* get() const { return set_; }
  size_t bytes() const { return bytes_; }
  std::vector<int> members() const {
    std::vector<int> all;
    for (int cpu = 0; cpu < kMost; ++cpu) {
      if (has(cpu)) all.push_back(cpu);
    }
    return all;
  }
  bool has(int cpu) const { return CPU_ISSET_S(static_cast<size_t>(cpu), bytes_, set_); }

 private:
  static constexpr int kMost = 8192;  // what Linux is built for at most on x86-64
  size_t bytes_;
  cpu_set_t* set_;
};

bool contains(const std::vector<int>& cpus, int cpu) {
  return std::find(cpus.begin(), cpus.end(), cpu) != cpus.end();
}

}  // namespace

Pool::Pool(std::vector<Seat> seats)
    : seats_(seats.empty() ? std::vector<Seat>(1) : std::move(seats)),
      shares_(new Share[seats_.size()]),
      now_(make_tag(0, kDone)) {
  const int threads = this->threads();
  starts_.reserve(seats_.size());
  int nodes = 1;
  for (const Seat& seat : seats_) nodes = std::max(nodes, seat.node + 1);
  std::vector<std::vector<int>> by_node(static_cast<size_t>(nodes));
  for (int t = 1; t < threads; ++t) by_node[static_cast<size_t>(node_of(t))].push_back(t);
  std::vector<int>& callers = by_node[static_cast<size_t>(node_of(0))];
  bool several = false;
  for (const Seat& seat : seats_) several |= seat.node != node_of(0);
  if (!several || callers.empty()) callers.insert(callers.begin(), 0);
  for (int node = 0; node < nodes; ++node) {
    const std::vector<int>& members = by_node[static_cast<size_t>(node)];
    if (members.empty() && !groups_.empty()) groups_.back().last_node = node;
    if (!members.empty()) groups_.push_back({node, node, members});
  }
  order_.resize(seats_.size());
  for (int t = 0; t < threads; ++t) {
    std::vector<int>& order = order_[static_cast<size_t>(t)];
    for (const bool own_node : {true, false}) {
      for (int i = 0; i < threads; ++i) {
        const int other = (t + i) % threads;
        if ((node_of(other) == node_of(t)) == own_node) order.push_back(other);
      }
    }
  }
}

std::atomic<int> Pool::coming{0};

Pool::~Pool() { stop_workers(); }

void* Pool::main(void* start) {
  const Start* s = static_cast<Start*>(start);
  s->pool->worker(s->thread);
  return nullptr;
}

void Pool::start_workers() {
  started_ = true;
  stop_.store(false);
  starts_.clear();
  // Signals belong to the threads of the program: workers are born with all of them blocked.
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int failure = 0;
  for (int i = 1; i < threads() && failure == 0; ++i) {
    starts_.push_back({this, i});
    pthread_t id;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    const std::vector<int>& cpus = seats_[static_cast<size_t>(i)].cpus;
    if (!cpus.empty()) {
      const CpuSet set(cpus);
      pthread_attr_setaffinity_np(&attributes, set.bytes(), set.get());
    }
    failure = pthread_create(&id, &attributes, &Pool::main, &starts_.back());
    // A CPU that went offline, or left this process's mask, is no reason to fail: run anywhere.
    if (failure == EINVAL) failure = pthread_create(&id, nullptr, &Pool::main, &starts_.back());
    pthread_attr_destroy(&attributes);
    if (failure == 0) {
      pthread_setname_np(id, "hetero-worker");
      workers_.push_back(id);
    }
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (failure != 0) {
    stop_workers();
    throw std::system_error(failure, std::generic_category(), "cannot start a worker thread");
  }
}

void Pool::stop_workers() {
  stop_.store(true);
  publish(make_tag(++epoch_, kDone));
  for (pthread_t id : workers_) pthread_join(id, nullptr);
  workers_.clear();
  started_ = false;
}

void Pool::after_fork_in_child() {
  workers_.clear();
  started_ = false;
  coming.store(0);
  worker_sleep_.sleepers.store(0);
  caller_sleep_.sleepers.store(0);
  now_.store(make_tag(++epoch_, kDone));
}

void Pool::wake(Sleep* sleep, int most) {
  if (sleep->sleepers.load(std::memory_order_seq_cst) <= 0) return;
  sleep->signal.fetch_add(1, std::memory_order_seq_cst);
  futex(&sleep->signal, FUTEX_WAKE, static_cast<uint32_t>(most));
}

void Pool::publish(uint64_t tag) {
  now_.store(tag, std::memory_order_seq_cst);
  wake(&caller_sleep_, 1);
  if (is_for_workers(tag)) wake(&worker_sleep_, kWakeAtOnce);
}

void Pool::rouse() { wake(&worker_sleep_, std::numeric_limits<int>::max()); }

uint64_t Pool::progress() const {
  uint64_t sum = now_.load(std::memory_order_relaxed) + alone_.load(std::memory_order_relaxed);
  for (int t = 0; t < threads(); ++t) {
    sum += shares_[static_cast<size_t>(t)].word.load(std::memory_order_relaxed);
  }
  return sum;
}

void Pool::wait_change(Sleep* sleep, uint64_t seen, int64_t spin_ns) {
  const int64_t start = now_ns();
  int64_t waited = 0;
  do {
    for (int i = 0; i < 16; ++i) {
      if (now_.load(std::memory_order_acquire) != seen) return;
      __builtin_ia32_pause();
    }
    if (waited >= spin_ns) sched_yield();
    waited = now_ns() - start;
  } while (waited < spin_ns || (waited < kSpinComingNs && coming.load(std::memory_order_relaxed) > 0));
  sleep->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t signal = sleep->signal.load(std::memory_order_seq_cst);
  if (now_.load(std::memory_order_seq_cst) == seen) futex(&sleep->signal, FUTEX_WAIT, signal);
  const bool others = sleep->sleepers.fetch_sub(1, std::memory_order_seq_cst) > 1;
  const uint64_t tag = now_.load(std::memory_order_acquire);
  if (others && tag != seen && is_for_workers(tag)) futex(&sleep->signal, FUTEX_WAKE, kWakeAtOnce);
}

// Whether sleeping workers must know of it: the end of a step lets them sleep on, the end of the pool does
// not.
bool Pool::is_for_workers(uint64_t tag) const {
  return phase_of(tag) != kDone || stop_.load(std::memory_order_relaxed);
}

void Pool::execute(int phase, int64_t chunk, int thread) noexcept {
  if (!failed_.load(std::memory_order_relaxed)) {
    try {
      phases_[phase].fn(phases_[phase].ctx, chunk, thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }
}

int64_t Pool::left_of(int phase) const { return int64_t{shares_used_[phase]} << 32 | phases_[phase].chunks; }

// Takes one chunk of a share and runs it; counts the share in `emptied` when it was the last.
Pool::Claim Pool::claim(uint64_t tag, size_t share, int thread, int64_t* emptied) {
  Share& s = shares_[share];
  const int phase = static_cast<int>(phase_of(tag));
  uint64_t word = s.word.load(std::memory_order_acquire);
  for (;;) {
    if (static_cast<int64_t>((tag_of(word) - tag) << kNextBits) > 0) return Claim::kStale;
    const int64_t next = tag_of(word) == tag ? next_of(word) : 0;
    const uint64_t range = s.range[phase].load(std::memory_order_acquire);
    const int64_t begin = begin_of(range), end = end_of(range);
    if (begin + next >= end) return Claim::kEmpty;
    if (s.word.compare_exchange_weak(word, make_word(tag, next + 1), std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
      *emptied += begin + next + 1 == end;
      execute(phase, begin + next, thread);
      return Claim::kRan;
    }
  }
}

// Runs what there is to claim. False when there was nothing and the tag is current.
bool Pool::work(uint64_t tag, int thread) {
  const int phase = static_cast<int>(phase_of(tag));
  const int only = only_[phase].load(std::memory_order_relaxed);
  if (only >= 0 && thread != 0 && node_of(thread) != only) return false;
  int64_t ran = 0, emptied = 0;
  Claim last = Claim::kEmpty;
  for (const int share : order_[static_cast<size_t>(thread)]) {
    if (share != thread && (left_.load(std::memory_order_relaxed) >> 32) <= emptied) break;
    do {
      last = claim(tag, static_cast<size_t>(share), thread, &emptied);
      ran += last == Claim::kRan;
    } while (last == Claim::kRan);
    if (last == Claim::kStale) break;
  }
  if (ran == 0) return last == Claim::kStale;
  const int64_t delta = -ran - (emptied << 32);
  if (left_.fetch_add(delta, std::memory_order_acq_rel) + delta == 0) complete(phase);
  return true;
}

// Called by the thread that completed the phase: nobody else can claim or count until it publishes.
void Pool::complete(int phase) {
  if (phase + 1 == phase_count_) {
    publish(make_tag(epoch_, kDone));
    return;
  }
  left_.store(left_of(phase + 1), std::memory_order_relaxed);
  publish(make_tag(epoch_, static_cast<uint64_t>(phase + 1)));
}

// Takes a caller that sits on a worker's core to its own; both would wait for each other there, since the
// worker cannot leave. Nothing is done for a thread that may not run on that core.
void Pool::step_off() const {
  const std::vector<int>& own = seats_[0].cpus;
  if (own.empty() || contains(own, sched_getcpu())) return;
  CpuSet mask({});
  if (sched_getaffinity(0, mask.bytes(), mask.get()) != 0) return;
  for (const int cpu : own) {
    if (!mask.has(cpu)) return;
  }
  const CpuSet target(own);
  if (sched_setaffinity(0, target.bytes(), target.get()) == 0) sched_setaffinity(0, mask.bytes(), mask.get());
}

void Pool::sit(std::vector<int>* mask) const {
  CpuSet now({});
  if (sched_getaffinity(0, now.bytes(), now.get()) != 0) return;
  if (mask->empty()) *mask = now.members();
  const std::vector<int>& own = seats_[0].cpus;
  const bool allowed =
      !own.empty() && std::all_of(own.begin(), own.end(), [&](int c) { return contains(*mask, c); });
  const CpuSet target(allowed ? own : *mask);
  if (!CPU_EQUAL_S(now.bytes(), target.get(), now.get())) sched_setaffinity(0, target.bytes(), target.get());
}

// Divides the chunks of a phase among the shares.
void Pool::deal(int phase) {
  const Phase& p = phases_[phase];
  bool alone = false;  // whether the node that the phase is tied to has threads
  int64_t members = 0;
  for (const Group& group : groups_) {
    alone |= p.only >= 0 && group.node == p.only;
    members += static_cast<int64_t>(group.threads.size());
  }
  only_[phase].store(alone ? p.only : -1, std::memory_order_relaxed);
  shares_used_[phase] = 0;
  auto give = [&](int thread, int64_t begin, int64_t end) {
    shares_used_[phase] += begin < end;
    shares_[static_cast<size_t>(thread)].range[phase].store(make_range(begin, end),
                                                            std::memory_order_release);
  };
  if (groups_.size() > 1) give(0, 0, 0);
  int64_t begin = 0, dealt = 0;
  for (const Group& group : groups_) {
    const int64_t size = static_cast<int64_t>(group.threads.size());
    int64_t end = begin;
    dealt += size;
    if (alone) {
      if (group.node == p.only) end = p.chunks;
    } else if (&group == &groups_.back()) {
      end = p.chunks;
    } else if (p.node_ends != nullptr) {
      end = p.node_ends[std::min(group.last_node, p.nodes - 1)];
    } else {
      end = p.chunks * dealt / members;
    }
    for (int64_t i = 0; i < size; ++i) {
      give(group.threads[static_cast<size_t>(i)], begin + (end - begin) * i / size,
           begin + (end - begin) * (i + 1) / size);
    }
    begin = end;
  }
}

void Pool::worker(int thread) {
  for (;;) {
    const uint64_t tag = now_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    const bool in_step = phase_of(tag) != kDone;
    if (in_step && work(tag, thread)) continue;
    wait_change(&worker_sleep_, tag, in_step ? kSpinInStepNs : kSpinIdleNs);
  }
}

void Pool::run(const Phase* phases, int count) {
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    if (phases[i].chunks >= kMaxChunks) throw std::length_error("too many chunks in a phase");
    if (phases[i].chunks > 0) phases_[kept++] = phases[i];
  }
  if (kept == 0) return;
  if (threads() == 1) {
    for (int p = 0; p < kept; ++p) {
      for (int64_t c = 0; c < phases_[p].chunks; ++c) {
        alone_.fetch_add(1, std::memory_order_relaxed);
        phases_[p].fn(phases_[p].ctx, c, 0);
      }
    }
    return;
  }
  if (!started_) start_workers();
  step_off();
  phase_count_ = kept;
  error_ = nullptr;
  failed_.store(false, std::memory_order_relaxed);
  ++epoch_;
  for (int t = 0; t < threads(); ++t) {
    shares_[static_cast<size_t>(t)].word.store(make_word(make_tag(epoch_, 0), 0), std::memory_order_release);
  }
  for (int i = 0; i < kept; ++i) deal(i);
  left_.store(left_of(0), std::memory_order_relaxed);
  publish(make_tag(epoch_, 0));
  for (;;) {
    const uint64_t tag = now_.load(std::memory_order_acquire);
    if (phase_of(tag) == kDone) break;
    if (!work(tag, 0)) wait_change(&caller_sleep_, tag, kSpinInStepNs);
  }
  if (error_) {
    std::exception_ptr error = error_;
    error_ = nullptr;
    std::rethrow_exception(error);
  }
}

}  // namespace hetero
