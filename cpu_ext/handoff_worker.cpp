// The worker of a channel: looks for layers that were submitted, computes them, publishes their results.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>

#include "handoff_state.h"

namespace hetero {

void Channel::State::point(Worker& w, Point where, int64_t at, int64_t layer) {
  faults.strike(where, at, layer, &w.random);
}

int64_t Channel::State::ready(const Worker& w) {
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

int64_t Channel::State::id(const std::vector<uint8_t>& ids, int64_t i) const {
  return layout.wide ? reinterpret_cast<const int64_t*>(ids.data())[i]
                     : int64_t{reinterpret_cast<const int32_t*>(ids.data())[i]};
}

void Channel::State::set_id(std::vector<uint8_t>& ids, int64_t i, int64_t value) const {
  if (layout.wide) {
    reinterpret_cast<int64_t*>(ids.data())[i] = value;
  } else {
    reinterpret_cast<int32_t*>(ids.data())[i] = static_cast<int32_t>(value);
  }
}

void Channel::State::count(Worker& w, const std::vector<uint8_t>& ids, int64_t pairs, int64_t most) {
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

void Channel::State::put_off(Worker& w, int64_t at, int64_t layer, int64_t pairs) {
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

void Channel::State::compute(Worker& w, int64_t at, int64_t layer, const std::vector<uint8_t>& ids,
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

void Channel::State::work(Worker& w, int64_t at, int64_t layer) {
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

bool Channel::State::catch_up(Worker& w, int64_t at) {
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
    std::fill(w.looked.begin(), w.looked.end(), ended);
  }
  return move(w, kPublish, kPoll);
}

bool Channel::State::serve(Worker& w, int64_t at) {
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
    std::fill(w.looked.begin(), w.looked.end(), published);  // it had no time for other lanes
    l.next.store(layer + 1, std::memory_order_relaxed);
    if (last) finish(l);
  }
  if (last) tell_served();
  point(w, Point::kPublished, at, layer);
  return move(w, kPublish, kPoll);
}

void Channel::State::arrive(Worker& w) {
  Context& own = context();
  std::lock_guard<std::mutex> hold(own.swap);
  own.pool->sit(&w.mask);
  own.pool->rouse();
}

void Channel::State::sleep(Worker& w) {
  {
    std::unique_lock<std::mutex> hold(mutex);
    const uint64_t own = make_turn(w.generation, kPoll);
    wake.wait(hold, [&] { return any_active() || stop.load() || turn.load() != own; });
  }
  if (!stop.load()) arrive(w);
  w.beat.fetch_add(1, std::memory_order_relaxed);
}

void Channel::State::meet_lanes(Worker& w) {
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

void Channel::State::run(Worker& w) {
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

}  // namespace hetero
