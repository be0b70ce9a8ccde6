#include "handoff.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
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

#include "context.h"
#include "faults.h"

namespace hetero {
namespace {

// Looking for a flag: so long with pauses, then giving the core to others, then in naps. The GPU's part of a
// layer is within the first: a core that is given away to a busy neighbour is gone for milliseconds.
constexpr int64_t kPauseNs = 200'000;
constexpr int64_t kYieldNs = 5'000'000;
constexpr int64_t kNapNs = 50'000;

constexpr int kTicks = 8;  // of the watchdog within the limit
constexpr int kRetries = 2;

enum Duty : uint64_t { kVacant, kPoll, kWork, kPublish };
enum LaneState : uint32_t { kIdle, kActive, kServed };

constexpr uint64_t make_turn(uint64_t generation, Duty duty) { return generation << 2 | duty; }
constexpr Duty duty_of(uint64_t turn) { return static_cast<Duty>(turn & 3); }

// Waits a little between two looks, the longer it has waited already.
void ease(int64_t waited) {
  if (waited < kPauseNs) {
    __builtin_ia32_pause();
  } else if (waited < kYieldNs) {
    sched_yield();
  } else {
    sleep_for(kNapNs);
  }
}

}  // namespace

// One worker. Its memory is its own, so that whatever it still does after it was replaced harms nobody.
struct Worker {
  uint64_t generation;
  std::atomic<pid_t> tid{0};
  std::atomic<uint64_t> beat{0};
  std::atomic<bool> left{false};          // will not touch the channel again
  std::atomic<Context*> inside{nullptr};  // whose lock it holds or waits for
  std::vector<uint8_t> ids;
  std::vector<uint8_t> chosen;  // by expert, for counting; zero between uses
  int64_t experts = 0;          // distinct ones of the layer at hand
  std::vector<float> out;
  std::vector<int64_t> step;    // of each lane, as begin counts them
  std::vector<int64_t> next;    // layer of each lane
  std::vector<int64_t> looked;  // since when it looks for it
  // Deferred experts of each lane: the ids that were put off at its last layer, and their sum.
  struct Later {
    bool waits = false;    // ids are to be computed
    bool carries = false;  // the sum is to be added to the next result
    std::vector<uint8_t> ids;
    std::vector<float> sum;
  };
  std::vector<Later> later;
  std::vector<int> mask;  // CPUs that it may run on
  uint64_t random = 0;

  bool is_dead() const {
    const pid_t id = tid.load();
    return id != 0 && syscall(SYS_tgkill, getpid(), id, 0) != 0 && errno == ESRCH;
  }
  bool is_gone() const { return left.load(std::memory_order_acquire) || is_dead(); }
};

struct Channel::State : std::enable_shared_from_this<Channel::State> {
  struct Times {
    std::atomic<int64_t> looked{0}, seen{0}, began{0}, ended{0}, published{0}, experts{0};
    std::atomic<int64_t> later_began{0}, later_ended{0}, later_experts{0};
  };
  struct Lane {
    std::atomic<uint32_t> state{kIdle};
    std::atomic<int64_t> rows{0}, next{0}, since{0}, step{0};
    std::atomic<bool> abort{false};
    std::unique_ptr<Times[]> times;
    // Under `mutex`.
    bool dirty = false;  // flags may be set though no step is in flight
    std::string error;
  };

  uint8_t* memory;
  const ChannelLayout layout;
  const std::vector<const Experts*> experts;
  const int64_t limit_ns;
  const bool defer;
  const pid_t pid = getpid();
  std::unique_ptr<Lane[]> lanes;

  std::atomic<uint64_t> turn{make_turn(0, kVacant)};
  std::atomic<bool> stop{false};

  // Held for what hosts, watchdog and sleepers share; never while experts work.
  std::mutex mutex;
  std::condition_variable wake, served;
  std::shared_ptr<Worker> worker, tainted;  // in office; replaced while it published
  std::vector<std::shared_ptr<Worker>> replaced;
  int64_t started = 0;
  bool watching = false;
  int stale = 0, retries = 0;
  uint64_t last_sign = 0;

  Faults faults;

  State(uint8_t* at, const ChannelLayout& shape, std::vector<const Experts*> all, int64_t limit, bool put_off)
      : memory(at), layout(shape), experts(std::move(all)), limit_ns(limit), defer(put_off) {
    lanes.reset(new Lane[static_cast<size_t>(layout.lanes)]);
    for (int64_t i = 0; i < layout.lanes; ++i) {
      lane(i).times.reset(new Times[static_cast<size_t>(layout.layers)]);
    }
  }

  Lane& lane(int64_t i) { return lanes[static_cast<size_t>(i)]; }
  std::atomic<uint32_t>& flag(int64_t offset) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a flag is a plain word");
    return *reinterpret_cast<std::atomic<uint32_t>*>(memory + offset);
  }
  float* result(int64_t at, int64_t layer) {
    return reinterpret_cast<float*>(memory + layout.result(at, layer));
  }
  bool any_active() {
    for (int64_t i = 0; i < layout.lanes; ++i) {
      if (lane(i).state.load(std::memory_order_acquire) == kActive) return true;
    }
    return false;
  }

  // -- the office

  bool move(const Worker& w, Duty from, Duty to) {
    uint64_t expected = make_turn(w.generation, from);
    return turn.compare_exchange_strong(expected, make_turn(w.generation, to), std::memory_order_acq_rel);
  }

  void finish(Lane& l) {
    uint32_t active = kActive;
    if (l.state.compare_exchange_strong(active, kServed, std::memory_order_acq_rel))
      Pool::coming.fetch_sub(1);
  }

  void tell_served() {
    {
      std::lock_guard<std::mutex> hold(mutex);
    }
    served.notify_all();
  }

  // Answers all layers of the lane's step in advance. By a worker that publishes, or after its office was
  // taken. `error` is kept by the caller, who holds or takes the mutex.
  void release(int64_t at) {
    const int64_t floats = layout.rows * layout.hidden;
    for (int64_t slot = 0; slot < std::min(layout.depth, layout.layers); ++slot) {
      std::fill_n(result(at, slot), floats, std::numeric_limits<float>::quiet_NaN());
    }
    for (int64_t layer = 0; layer < layout.layers; ++layer) {
      flag(layout.done(at, layer)).store(1, std::memory_order_release);
    }
    finish(lane(at));
  }

  void keep_error(int64_t at, const std::string& text) {
    std::lock_guard<std::mutex> hold(mutex);
    if (lane(at).error.empty()) lane(at).error = text;
  }

  // -- the worker

  void point(Worker& w, Point where, int64_t at, int64_t layer) {
    faults.strike(where, at, layer, &w.random);
  }

  // The lane whose next layer is ready, or that is to be let go, or else that has deferred experts; -1: none.
  int64_t ready(const Worker& w) {
    int64_t best = -1, idle = -1;
    for (int64_t i = 0; i < layout.lanes; ++i) {
      Lane& l = lane(i);
      if (l.state.load(std::memory_order_acquire) != kActive) continue;
      if (l.abort.load(std::memory_order_relaxed)) return i;
      const int64_t layer = w.next[static_cast<size_t>(i)];
      if (w.later[static_cast<size_t>(i)].waits) idle = i;
      if (flag(layout.submit(i, layer)).load(std::memory_order_acquire) == 0) continue;
      if (best < 0 || layer < w.next[static_cast<size_t>(best)]) best = i;
    }
    return best < 0 ? idle : best;
  }

  int64_t id(const std::vector<uint8_t>& ids, int64_t i) const {
    return layout.wide ? reinterpret_cast<const int64_t*>(ids.data())[i]
                       : int64_t{reinterpret_cast<const int32_t*>(ids.data())[i]};
  }
  void set_id(std::vector<uint8_t>& ids, int64_t i, int64_t value) const {
    if (layout.wide) {
      reinterpret_cast<int64_t*>(ids.data())[i] = value;
    } else {
      reinterpret_cast<int32_t*>(ids.data())[i] = static_cast<int32_t>(value);
    }
  }

  // How many distinct experts the ids name.
  void count(Worker& w, const std::vector<uint8_t>& ids, int64_t pairs, int64_t most) {
    const auto id = [&](int64_t i) { return this->id(ids, i); };
    if (static_cast<int64_t>(w.chosen.size()) < most) w.chosen.resize(static_cast<size_t>(most));
    w.experts = 0;
    for (const uint8_t mark : {1, 0}) {
      for (int64_t i = 0; i < pairs; ++i) {
        if (id(i) < 0 || id(i) >= most) continue;
        uint8_t& chosen = w.chosen[static_cast<size_t>(id(i))];
        w.experts += mark > chosen;
        chosen = mark;
      }
    }
  }

  // Takes the deferred ids out of the worker's; the last layer's are computed with the others.
  void put_off(Worker& w, int64_t at, int64_t layer, int64_t pairs) {
    const int64_t most = experts[static_cast<size_t>(layer)]->config().experts;
    Worker::Later& later = w.later[static_cast<size_t>(at)];
    later.waits = false;
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t found = id(w.ids, i) - most;
      const bool meant = found >= 0 && found < most, last = layer + 1 == layout.layers;
      if (meant) set_id(w.ids, i, last ? found : -1);
      set_id(later.ids, i, meant && !last ? found : -1);
      later.waits = later.waits || (meant && !last);
    }
  }

  // The sum of the experts that the ids name, of one layer, into memory of the worker.
  void compute(Worker& w, int64_t at, int64_t layer, const std::vector<uint8_t>& ids,
               std::vector<float>& to) {
    const int64_t rows = lane(at).rows.load(std::memory_order_relaxed);
    const Experts& op = *experts[static_cast<size_t>(layer)];
    count(w, ids, rows * layout.slots, op.config().experts);
    Context& own = context();
    w.inside.store(&own, std::memory_order_release);
    op.forward(own, memory + layout.x(at, layer), layout.type, {ids.data(), layout.wide, rows, layout.slots},
               reinterpret_cast<const float*>(memory + layout.weights(at, layer)), to.data());
    w.inside.store(nullptr, std::memory_order_release);
  }

  // Computes one layer into the worker's own memory.
  void work(Worker& w, int64_t at, int64_t layer) {
    point(w, Point::kWork, at, layer);
    const int64_t rows = lane(at).rows.load(std::memory_order_relaxed);
    std::memcpy(w.ids.data(), memory + layout.ids(at, layer), static_cast<size_t>(layout.ids_bytes(rows)));
    Worker::Later& later = w.later[static_cast<size_t>(at)];
    if (defer) put_off(w, at, layer, rows * layout.slots);
    compute(w, at, layer, w.ids, w.out);
    if (later.carries) {
      for (int64_t i = 0; i < rows * layout.hidden; ++i)
        w.out[static_cast<size_t>(i)] += later.sum[static_cast<size_t>(i)];
      later.carries = false;
    }
    point(w, Point::kComputed, at, layer);
  }

  // Computes the deferred experts of the lane's last layer. Writes nothing into the channel but an error: a
  // turn of its own, so that a worker that was replaced meanwhile leaves. Its x and weights still stand in
  // their slot: a depth of 2 lets the GPU fill it again only after it has the next layer's result.
  bool catch_up(Worker& w, int64_t at) {
    const size_t i = static_cast<size_t>(at);
    const int64_t layer = w.next[i] - 1;
    Worker::Later& later = w.later[i];
    if (!move(w, kPoll, kWork)) return false;
    w.beat.fetch_add(1, std::memory_order_relaxed);
    std::string error;
    const int64_t began = monotonic_ns();
    try {
      point(w, Point::kWork, at, layer);
      compute(w, at, layer, later.ids, later.sum);
      point(w, Point::kComputed, at, layer);
    } catch (const std::exception& e) {
      w.inside.store(nullptr, std::memory_order_release);
      error = "layer " + std::to_string(layer) + ", deferred: " + e.what();
    }
    later.waits = false;
    later.carries = true;
    const int64_t ended = monotonic_ns();
    w.beat.fetch_add(1, std::memory_order_relaxed);
    if (!move(w, kWork, kPublish)) return false;
    if (!error.empty()) {
      keep_error(at, error);
      release(at);
      tell_served();
    } else {
      Times& t = lane(at).times[static_cast<size_t>(layer)];
      t.later_began.store(began, std::memory_order_relaxed);
      t.later_ended.store(ended, std::memory_order_relaxed);
      t.later_experts.store(w.experts, std::memory_order_relaxed);
      w.looked[i] = ended;
    }
    return move(w, kPublish, kPoll);
  }

  // Serves what is ready. False: the worker is not in office any more.
  bool serve(Worker& w, int64_t at) {
    Lane& l = lane(at);
    const size_t i = static_cast<size_t>(at);
    if (l.abort.load(std::memory_order_relaxed)) {
      if (!move(w, kPoll, kPublish)) return false;
      keep_error(at, "the step was given up");
      release(at);
      tell_served();
      return move(w, kPublish, kPoll);
    }
    if (w.later[i].waits) return catch_up(w, at);
    const int64_t layer = w.next[i], seen = monotonic_ns();
    point(w, Point::kSeen, at, layer);
    if (!move(w, kPoll, kWork)) return false;
    w.beat.fetch_add(1, std::memory_order_relaxed);
    std::string error;
    const int64_t began = monotonic_ns();
    try {
      work(w, at, layer);
    } catch (const std::exception& e) {
      w.inside.store(nullptr, std::memory_order_release);
      error = "layer " + std::to_string(layer) + ": " + e.what();
    }
    const int64_t ended = monotonic_ns();
    w.beat.fetch_add(1, std::memory_order_relaxed);
    if (!move(w, kWork, kPublish)) return false;
    point(w, Point::kPublish, at, layer);
    const bool last = layer + 1 == layout.layers || !error.empty();
    if (!error.empty()) {
      keep_error(at, error);
      release(at);
    } else {
      const int64_t rows = l.rows.load(std::memory_order_relaxed);
      std::memcpy(result(at, layer), w.out.data(), static_cast<size_t>(rows * layout.hidden) * 4);
      flag(layout.submit(at, layer)).store(0, std::memory_order_relaxed);
      flag(layout.done(at, layer)).store(1, std::memory_order_release);
      const int64_t published = monotonic_ns();
      Times& t = l.times[static_cast<size_t>(layer)];
      t.looked.store(w.looked[i], std::memory_order_relaxed);
      t.seen.store(seen, std::memory_order_relaxed);
      t.began.store(began, std::memory_order_relaxed);
      t.ended.store(ended, std::memory_order_relaxed);
      t.published.store(published, std::memory_order_relaxed);
      t.experts.store(w.experts, std::memory_order_relaxed);
      for (auto* one : {&t.later_began, &t.later_ended, &t.later_experts})
        one->store(0, std::memory_order_relaxed);
      w.next[i] = layer + 1;
      w.looked[i] = published;
      l.next.store(layer + 1, std::memory_order_relaxed);
      if (last) finish(l);
    }
    if (last) tell_served();
    point(w, Point::kPublished, at, layer);
    return move(w, kPublish, kPoll);
  }

  // Sits where the pool's caller sits, and wakes the pool's threads.
  void arrive(Worker& w) {
    Context& own = context();
    std::lock_guard<std::mutex> hold(own.swap);
    own.pool->sit(&w.mask);
    own.pool->rouse();
  }

  // Sleeps while no step is in flight.
  void sleep(Worker& w) {
    {
      std::unique_lock<std::mutex> hold(mutex);
      const uint64_t own = make_turn(w.generation, kPoll);
      wake.wait(hold, [&] { return any_active() || stop.load() || turn.load() != own; });
    }
    if (!stop.load()) arrive(w);
    w.beat.fetch_add(1, std::memory_order_relaxed);
  }

  // Lanes whose step is new to this worker.
  void meet_lanes(Worker& w) {
    for (int64_t i = 0; i < layout.lanes; ++i) {
      Lane& l = lane(i);
      const size_t at = static_cast<size_t>(i);
      if (l.state.load(std::memory_order_acquire) != kActive) continue;
      const int64_t step = l.step.load(std::memory_order_relaxed);
      if (w.step[at] == step) continue;
      w.step[at] = step;
      w.next[at] = 0;
      w.later[at].waits = w.later[at].carries = false;
      w.looked[at] = l.since.load(std::memory_order_relaxed);
    }
  }

  void run(Worker& w) {
    w.tid.store(static_cast<pid_t>(syscall(SYS_gettid)));
    arrive(w);
    int64_t since = monotonic_ns();
    while (turn.load(std::memory_order_acquire) == make_turn(w.generation, kPoll)) {
      w.beat.fetch_add(1, std::memory_order_relaxed);
      meet_lanes(w);
      const int64_t at = ready(w);
      if (at >= 0) {
        if (!serve(w, at)) break;
        since = monotonic_ns();
      } else if (stop.load(std::memory_order_relaxed)) {
        break;
      } else if (!any_active()) {
        sleep(w);
        since = monotonic_ns();
      } else {
        ease(monotonic_ns() - since);
      }
    }
    w.left.store(true, std::memory_order_release);
    tell_served();
  }

  // Under `mutex`. Throws std::system_error where no thread can be had.
  void start_worker() {
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

  // Signals belong to the threads of the program: ours are born with all of them blocked.
  template <class Body>
  static void start_thread(const char* name, Body body) {
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

  // -- the watchdog

  void watch() {
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

  // Under `mutex`.
  void tick() {
    if (worker == nullptr || duty_of(turn.load()) == kVacant) return;
    uint64_t sign = worker->beat.load(std::memory_order_relaxed);
    if (Context* inside = worker->inside.load(std::memory_order_acquire)) sign += pool_progress(*inside);
    stale = sign == last_sign ? stale + 1 : 0;
    if (stale == 0) retries = 0;
    last_sign = sign;
    const bool dead = worker->is_dead();
    if (dead || stale >= kTicks) take_office(dead);
  }

  // Under `mutex`. Puts the worker out of office and releases its lanes, unless it moves at this moment.
  void take_office(bool dead) {
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
        l.error =
            "layer " + std::to_string(l.next.load()) + ": " +
            (dead ? "the worker's thread ended"
                  : "the worker gave no sign of life for " + std::to_string(limit_ns / 1000000) + " ms");
      }
      release(i);
    }
    wake.notify_all();
    served.notify_all();
  }

  // -- the host

  // Under `mutex`, which is given up while it waits. A worker is in office afterwards, and no older one can
  // still write.
  void fill_office(std::unique_lock<std::mutex>& hold) {
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

  void clear_flags(int64_t at) {
    for (int64_t layer = 0; layer < layout.layers; ++layer) {
      flag(layout.submit(at, layer)).store(0);
      flag(layout.done(at, layer)).store(0);
    }
    flag(layout.fault(at)).store(0);
  }

  // What the flags of a lane say that was served and collected: nothing, or which layer is amiss.
  std::string check_flags(int64_t at) {
    if (const uint32_t layer = flag(layout.fault(at)).load())
      return "layer " + std::to_string(layer - 1) + ": the GPU's waiting kernel ran out of time";
    for (int64_t layer = 0; layer < layout.layers; ++layer) {
      if (flag(layout.submit(at, layer)).load() != 0 || flag(layout.done(at, layer)).load() != 0)
        return "layer " + std::to_string(layer) + ": submitted and not collected";
    }
    return "";
  }
};

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
