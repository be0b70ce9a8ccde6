// The inner side of a channel: its state, the worker and the watchdog. docs/handoff.md has the protocol.
#pragma once

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "context.h"
#include "faults.h"
#include "handoff.h"

namespace hetero {

constexpr int kTicks = 8;  // of the watchdog within the limit

enum Duty : uint64_t { kVacant, kPoll, kWork, kPublish };
enum LaneState : uint32_t { kIdle, kActive, kServed };

constexpr uint64_t make_turn(uint64_t generation, Duty duty) { return generation << 2 | duty; }
constexpr Duty duty_of(uint64_t turn) { return static_cast<Duty>(turn & 3); }

// Waits a little between two looks, the longer it has waited already.
void ease(int64_t waited);

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
  bool move(const Worker& w, Duty from, Duty to);
  void finish(Lane& l);
  void tell_served();
  // Answers all layers of the lane's step in advance. By a worker that publishes, or after its office was
  // taken. `error` is kept by the caller, who holds or takes the mutex.
  void release(int64_t at);
  void keep_error(int64_t at, const std::string& text);

  // -- the worker
  void point(Worker& w, Point where, int64_t at, int64_t layer);
  // The lane whose next layer is ready, or that is to be let go, or else that has deferred experts; -1: none.
  int64_t ready(const Worker& w);
  int64_t id(const std::vector<uint8_t>& ids, int64_t i) const;
  void set_id(std::vector<uint8_t>& ids, int64_t i, int64_t value) const;
  // How many distinct experts the ids name.
  void count(Worker& w, const std::vector<uint8_t>& ids, int64_t pairs, int64_t most);
  // Takes the deferred ids out of the worker's; the last layer's are computed with the others.
  void put_off(Worker& w, int64_t at, int64_t layer, int64_t pairs);
  // The sum of the experts that the ids name, of one layer, into memory of the worker.
  void compute(Worker& w, int64_t at, int64_t layer, const std::vector<uint8_t>& ids, std::vector<float>& to);
  // Computes one layer into the worker's own memory.
  void work(Worker& w, int64_t at, int64_t layer);
  // Computes the deferred experts of the lane's last layer. Writes nothing into the channel but an error: a
  // turn of its own, so that a worker that was replaced meanwhile leaves. Its x and weights still stand in
  // their slot: a depth of 2 lets the GPU fill it again only after it has the next layer's result.
  bool catch_up(Worker& w, int64_t at);
  // Serves what is ready. False: the worker is not in office any more.
  bool serve(Worker& w, int64_t at);
  // Sits where the pool's caller sits, and wakes the pool's threads.
  void arrive(Worker& w);
  // Sleeps while no step is in flight.
  void sleep(Worker& w);
  // Lanes whose step is new to this worker.
  void meet_lanes(Worker& w);
  void run(Worker& w);
  // Under `mutex`. Throws std::system_error where no thread can be had.
  void start_worker();

  // -- the watchdog
  void watch();
  // Under `mutex`.
  void tick();
  // Under `mutex`. Puts the worker out of office and releases its lanes, unless it moves at this moment.
  void take_office(bool dead);

  // -- the host
  // Under `mutex`, which is given up while it waits. A worker is in office afterwards, and no older one can
  // still write.
  void fill_office(std::unique_lock<std::mutex>& hold);
  void clear_flags(int64_t at);
  // What the flags of a lane say that was served and collected: nothing, or which layer is amiss.
  std::string check_flags(int64_t at);
};

}  // namespace hetero
