#include "handoff.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "handoff_state.h"

namespace hetero {
namespace {

// Looking for a flag: so long with pauses, then giving the core to others, then in naps. The GPU's part of a
// layer is within the first: a core that is given away to a busy neighbour is gone for milliseconds.
constexpr int64_t kPauseNs = 200'000;
constexpr int64_t kYieldNs = 5'000'000;
constexpr int64_t kNapNs = 50'000;

constexpr int kRetries = 2;  // of the watchdog, with a worker that publishes

// Signals belong to the threads of the program: ours are born with all of them blocked.
template <class Body>
void start_thread(const char* name, Body body) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
    thread.detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

}  // namespace

void ease(int64_t waited) {
  if (waited < kPauseNs) {
    __builtin_ia32_pause();
  } else if (waited < kYieldNs) {
    sched_yield();
  } else {
    sleep_for(kNapNs);
  }
}

bool Channel::State::move(const Worker& w, Duty from, Duty to) {
  uint64_t expected = make_turn(w.generation, from);
  return turn.compare_exchange_strong(expected, make_turn(w.generation, to), std::memory_order_acq_rel);
}

void Channel::State::finish(Lane& l) {
  uint32_t active = kActive;
  if (l.state.compare_exchange_strong(active, kServed, std::memory_order_acq_rel)) Pool::coming.fetch_sub(1);
}

void Channel::State::tell_served() {
  {
    std::lock_guard<std::mutex> hold(mutex);
  }
  served.notify_all();
}

void Channel::State::release(int64_t at) {
  const int64_t floats = layout.rows * layout.hidden;
  for (int64_t slot = 0; slot < std::min(layout.depth, layout.layers); ++slot) {
    std::fill_n(result(at, slot), floats, std::numeric_limits<float>::quiet_NaN());
  }
  for (int64_t layer = 0; layer < layout.layers; ++layer) {
    flag(layout.done(at, layer)).store(1, std::memory_order_release);
  }
  finish(lane(at));
}

void Channel::State::keep_error(int64_t at, const std::string& text) {
  std::lock_guard<std::mutex> hold(mutex);
  if (lane(at).error.empty()) lane(at).error = text;
}

void Channel::State::start_worker() {
  auto fresh = std::make_shared<Worker>();
  fresh->generation = (turn.load() >> 2) + 1;
  fresh->ids.resize(static_cast<size_t>(layout.ids_bytes(layout.rows)));
  fresh->out.resize(static_cast<size_t>(layout.rows * layout.hidden));
  fresh->step.resize(static_cast<size_t>(layout.lanes));
  fresh->next.resize(static_cast<size_t>(layout.lanes));
  fresh->looked.resize(static_cast<size_t>(layout.lanes));
  fresh->later.resize(static_cast<size_t>(layout.lanes));
  for (Worker::Later& later : fresh->later) {
    if (!defer) break;
    later.ids.resize(fresh->ids.size());
    later.sum.resize(fresh->out.size());
  }
  fresh->random = static_cast<uint64_t>(monotonic_ns());
  turn.store(make_turn(fresh->generation, kPoll), std::memory_order_release);
  try {
    start_thread("hetero-handoff", [self = shared_from_this(), fresh] {
      try {
        self->run(*fresh);
      } catch (...) {  // the watchdog sees that the thread is no more
      }
    });
  } catch (...) {
    turn.store(make_turn(fresh->generation, kVacant));
    throw;
  }
  worker = fresh;
  ++started;
}

void Channel::State::watch() {
  std::unique_lock<std::mutex> hold(mutex);
  for (;;) {
    wake.wait(hold, [&] { return stop.load() || any_active(); });
    if (stop.load()) break;
    served.wait_for(hold, std::chrono::nanoseconds(limit_ns / kTicks), [&] { return stop.load(); });
    if (any_active()) tick();
  }
  watching = false;
  served.notify_all();
}

void Channel::State::tick() {
  if (worker == nullptr || duty_of(turn.load()) == kVacant) return;
  uint64_t sign = worker->beat.load(std::memory_order_relaxed);
  if (Context* inside = worker->inside.load(std::memory_order_acquire)) sign += pool_progress(*inside);
  stale = sign == last_sign ? stale + 1 : 0;
  if (stale == 0) retries = 0;
  last_sign = sign;
  const bool dead = worker->is_dead();
  if (dead || stale >= kTicks) take_office(dead);
}

void Channel::State::take_office(bool dead) {
  uint64_t expected = turn.load(std::memory_order_acquire);
  const Duty duty = duty_of(expected);
  if (duty == kPublish && !dead && retries++ < kRetries) return;
  if (!turn.compare_exchange_strong(expected, make_turn(worker->generation + 1, kVacant),
                                    std::memory_order_acq_rel)) {
    stale = 0;
    return;
  }
  if (duty == kPublish) tainted = worker;
  if (Context* inside = worker->inside.load(std::memory_order_acquire)) renew_context(*inside);
  replaced.push_back(std::move(worker));
  worker = nullptr;
  for (int64_t i = 0; i < layout.lanes; ++i) {
    Lane& l = lane(i);
    if (l.state.load() != kActive) continue;
    if (l.error.empty()) {
      l.error = "layer " + std::to_string(l.next.load()) + ": " +
                (dead ? "the worker's thread ended"
                      : "the worker gave no sign of life for " + std::to_string(limit_ns / 1000000) + " ms");
    }
    release(i);
  }
  wake.notify_all();
  served.notify_all();
}

void Channel::State::fill_office(std::unique_lock<std::mutex>& hold) {
  if (worker != nullptr && worker->is_dead()) take_office(true);
  const auto gone = [](const std::shared_ptr<Worker>& w) { return w->is_gone(); };
  replaced.erase(std::remove_if(replaced.begin(), replaced.end(), gone), replaced.end());
  if (tainted != nullptr) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
    while (!tainted->is_gone()) {
      if (std::chrono::steady_clock::now() > until)
        throw std::runtime_error("an earlier worker is stuck while it publishes a result");
      served.wait_for(hold, std::chrono::milliseconds(10));
    }
    tainted = nullptr;
  }
  if (duty_of(turn.load()) == kVacant) start_worker();
  if (!watching) {
    start_thread("hetero-watch", [self = shared_from_this()] { self->watch(); });
    watching = true;
  }
}

void Channel::State::clear_flags(int64_t at) {
  for (int64_t layer = 0; layer < layout.layers; ++layer) {
    flag(layout.submit(at, layer)).store(0);
    flag(layout.done(at, layer)).store(0);
  }
  flag(layout.fault(at)).store(0);
}

std::string Channel::State::check_flags(int64_t at) {
  if (const uint32_t layer = flag(layout.fault(at)).load())
    return "layer " + std::to_string(layer - 1) + ": the GPU's waiting kernel ran out of time";
  for (int64_t layer = 0; layer < layout.layers; ++layer) {
    if (flag(layout.submit(at, layer)).load() != 0 || flag(layout.done(at, layer)).load() != 0)
      return "layer " + std::to_string(layer) + ": submitted and not collected";
  }
  return "";
}

Channel::Channel(uint8_t* memory, const ChannelLayout& layout, std::vector<const Experts*> experts,
                 int64_t limit_ns, bool defer) {
  if (layout.lanes < 1 || layout.layers < 1 || layout.rows < 1 || layout.slots < 1 || layout.depth < 1)
    throw std::invalid_argument("lanes, layers, rows, slots and depth are at least 1");
  if (defer && layout.depth < 2)
    throw std::invalid_argument("deferred experts need a depth of 2: their x stays until the next layer");
  if (static_cast<int64_t>(experts.size()) != layout.layers)
    throw std::invalid_argument("experts of each layer are needed");
  for (const Experts* e : experts) {
    if (e->config().hidden != layout.hidden)
      throw std::invalid_argument("experts of " + std::to_string(e->config().hidden) +
                                  " columns in a channel of " + std::to_string(layout.hidden));
  }
  if (reinterpret_cast<uintptr_t>(memory) % ChannelLayout::kLine != 0)
    throw std::invalid_argument("the memory must begin at a line");
  if (limit_ns < kTicks * 1'000'000) throw std::invalid_argument("the limit must be at least 8 ms");
  state_ = std::make_shared<State>(memory, layout, std::move(experts), limit_ns, defer);
}

Channel::~Channel() { close(); }

void Channel::begin(int64_t at, int64_t rows) {
  State& s = *state_;
  if (at < 0 || at >= s.layout.lanes || rows < 1 || rows > s.layout.rows)
    throw std::invalid_argument("no such lane, or rows that the channel has no room for");
  if (getpid() != s.pid) throw std::runtime_error("the channel belongs to the process that made it");
  std::unique_lock<std::mutex> hold(s.mutex);
  State::Lane& l = s.lane(at);
  if (s.stop.load()) throw std::runtime_error("the channel is closed");
  if (l.state.load() != kIdle) throw std::runtime_error("the lane's last step has not ended");
  s.fill_office(hold);
  if (l.dirty) s.clear_flags(at);
  l.dirty = false;
  l.error.clear();
  l.abort.store(false);
  l.rows.store(rows);
  l.next.store(0);
  l.since.store(monotonic_ns());
  l.step.fetch_add(1);
  for (int64_t i = 0; i < s.layout.layers; ++i) l.times[static_cast<size_t>(i)].published.store(0);
  if (!s.any_active()) s.stale = s.retries = 0;
  Pool::coming.fetch_add(1);
  l.state.store(kActive, std::memory_order_release);
  s.wake.notify_all();
}

std::string Channel::end(int64_t at, bool abort) {
  State& s = *state_;
  if (at < 0 || at >= s.layout.lanes) throw std::invalid_argument("no such lane");
  std::unique_lock<std::mutex> hold(s.mutex);
  State::Lane& l = s.lane(at);
  if (l.state.load() == kIdle) throw std::runtime_error("the lane has no step");
  const auto wait = [&] {
    return s.served.wait_for(hold, std::chrono::nanoseconds(3 * s.limit_ns),
                             [&] { return l.state.load(std::memory_order_acquire) == kServed; });
  };
  if (abort) l.abort.store(true);
  if (!wait()) {
    // The GPU is through, so it will not submit what is missing.
    if (l.error.empty()) l.error = "layer " + std::to_string(l.next.load()) + ": was not submitted";
    l.abort.store(true);
    if (!wait()) throw std::runtime_error("the lane is neither served nor released");
  }
  if (l.error.empty()) l.error = s.check_flags(at);
  l.dirty = l.dirty || !l.error.empty();
  l.state.store(kIdle);
  return l.error;
}

std::vector<LayerTimes> Channel::times(int64_t at) const {
  std::vector<LayerTimes> all;
  for (int64_t i = 0; i < state_->layout.layers; ++i) {
    const State::Times& t = state_->lane(at).times[static_cast<size_t>(i)];
    if (t.published.load() == 0) {
      all.push_back({});
    } else {
      all.push_back({t.looked.load(), t.seen.load(), t.began.load(), t.ended.load(), t.published.load(),
                     t.experts.load(), t.later_began.load(), t.later_ended.load(), t.later_experts.load()});
    }
  }
  return all;
}

bool Channel::close() {
  State& s = *state_;
  if (getpid() != s.pid) return true;  // in the child of a fork nobody else is there to give the lock back
  std::unique_lock<std::mutex> hold(s.mutex);
  for (int64_t i = 0; i < s.layout.lanes; ++i) s.lane(i).abort.store(true);
  // The watchdog still looks after a worker that is stuck.
  s.served.wait_for(hold, std::chrono::nanoseconds(3 * s.limit_ns), [&] { return !s.any_active(); });
  s.stop.store(true);
  s.wake.notify_all();
  s.served.notify_all();
  if (s.worker != nullptr) s.replaced.push_back(std::move(s.worker));
  s.worker = nullptr;
  const auto gone = [&] {
    return std::all_of(s.replaced.begin(), s.replaced.end(), [](const auto& w) { return w->is_gone(); });
  };
  s.served.wait_for(hold, std::chrono::nanoseconds(s.limit_ns), [&] { return !s.watching && gone(); });
  return gone();
}

void Channel::inject(Point point, FaultKind kind, int64_t lane, int64_t layer, int64_t ns) {
  state_->faults.add({point, kind, lane, layer, ns});
}

void Channel::jitter(int64_t ns) { state_->faults.jitter(ns); }

int64_t Channel::workers() const {
  std::lock_guard<std::mutex> hold(state_->mutex);
  return state_->started;
}

void host_submit(void* flag) {
  static_cast<std::atomic<uint32_t>*>(flag)->store(1, std::memory_order_release);
}

void host_collect(void* flag) {
  std::atomic<uint32_t>& done = *static_cast<std::atomic<uint32_t>*>(flag);
  for (const int64_t start = monotonic_ns(); done.load(std::memory_order_acquire) == 0;)
    ease(monotonic_ns() - start);
  done.store(0, std::memory_order_release);
}

}  // namespace hetero
