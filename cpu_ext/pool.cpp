#include "pool.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <system_error>

namespace hetero {
namespace {

constexpr int kNextBits = 32;
constexpr int kPhaseBits = 4;
constexpr uint64_t kDone = (1u << kPhaseBits) - 1;  // phase of a ticket when no step is in flight
static_assert(Pool::kMaxPhases < kDone, "phases must fit their bits");

// A waiting thread spins this long, then sleeps. In a step the next phase is usually microseconds away;
// after a step a short linger catches a step that follows at once.
constexpr int64_t kSpinInStepNs = 50'000;
constexpr int64_t kSpinIdleNs = 20'000;

constexpr uint64_t make_ticket(uint64_t epoch, uint64_t phase) {
  return epoch << (kNextBits + kPhaseBits) | phase << kNextBits;
}
constexpr uint64_t phase_of(uint64_t ticket) { return ticket >> kNextBits & kDone; }
constexpr int64_t next_of(uint64_t ticket) {
  return static_cast<int64_t>(ticket & ((uint64_t{1} << kNextBits) - 1));
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void futex(std::atomic<uint32_t>* word, int op, uint32_t value) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), ticket_(make_ticket(0, kDone)) {
  for (auto& c : chunks_) c.store(0, std::memory_order_relaxed);
  starts_.reserve(static_cast<size_t>(threads_));
}

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
  for (int i = 1; i < threads_ && failure == 0; ++i) {
    starts_.push_back({this, i});
    pthread_t id;
    failure = pthread_create(&id, nullptr, &Pool::main, &starts_.back());
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
  publish(make_ticket(++epoch_, kDone));
  for (pthread_t id : workers_) pthread_join(id, nullptr);
  workers_.clear();
  started_ = false;
}

void Pool::after_fork_in_child() {
  workers_.clear();
  started_ = false;
  sleepers_.store(0);
  ticket_.store(make_ticket(++epoch_, kDone));
}

void Pool::publish(uint64_t ticket) {
  ticket_.store(ticket, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    signal_.fetch_add(1, std::memory_order_seq_cst);
    futex(&signal_, FUTEX_WAKE, INT32_MAX);
  }
}

void Pool::wait_change(uint64_t seen, int64_t spin_ns) {
  const int64_t until = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ticket_.load(std::memory_order_acquire) != seen) return;
      __builtin_ia32_pause();
    }
  } while (now_ns() < until);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t signal = signal_.load(std::memory_order_seq_cst);
  if (ticket_.load(std::memory_order_seq_cst) == seen) futex(&signal_, FUTEX_WAIT, signal);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Pool::execute(int phase, int64_t chunk, int thread) noexcept {
  if (!failed_.load(std::memory_order_relaxed)) {
    try {
      phases_[phase].fn(phases_[phase].ctx, chunk, thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }
  const int64_t total = chunks_[phase].load(std::memory_order_relaxed);
  const int count = phase_count_;
  const uint64_t epoch = epoch_;
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 != total) return;
  // This thread completed the phase: nobody else can claim or count until it publishes.
  done_.store(0, std::memory_order_relaxed);
  const uint64_t next = phase + 1 == count ? kDone : static_cast<uint64_t>(phase + 1);
  publish(make_ticket(epoch, next));
}

// True when there may be more to claim at once, false when the caller must wait for the ticket to change.
bool Pool::claim_one(uint64_t ticket, int thread) {
  const uint64_t phase = phase_of(ticket);
  if (phase == kDone || next_of(ticket) >= chunks_[phase].load(std::memory_order_relaxed)) return false;
  if (ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel,
                                      std::memory_order_relaxed)) {
    execute(static_cast<int>(phase), next_of(ticket), thread);
  }
  return true;
}

void Pool::worker(int thread) {
  for (;;) {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (claim_one(ticket, thread)) continue;
    wait_change(ticket, phase_of(ticket) == kDone ? kSpinIdleNs : kSpinInStepNs);
  }
}

void Pool::run(const Phase* phases, int count) {
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    if (phases[i].chunks > 0) phases_[kept++] = phases[i];
  }
  if (kept == 0) return;
  if (threads_ == 1) {
    for (int p = 0; p < kept; ++p) {
      for (int64_t c = 0; c < phases_[p].chunks; ++c) phases_[p].fn(phases_[p].ctx, c, 0);
    }
    return;
  }
  if (!started_) start_workers();
  phase_count_ = kept;
  error_ = nullptr;
  failed_.store(false, std::memory_order_relaxed);
  for (int i = 0; i < kept; ++i) chunks_[i].store(phases_[i].chunks, std::memory_order_relaxed);
  ++epoch_;
  publish(make_ticket(epoch_, 0));
  for (;;) {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (phase_of(ticket) == kDone) break;
    if (!claim_one(ticket, 0)) wait_change(ticket, kSpinInStepNs);
  }
  if (error_) {
    std::exception_ptr error = error_;
    error_ = nullptr;
    std::rethrow_exception(error);
  }
}

}  // namespace hetero
