// The CPU side of the hand-off between a GPU's graph and the experts. The protocol, its orders and why
// nothing hangs: docs/handoff.md, whose words are used here.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "faults.h"
#include "moe.h"

namespace hetero {

// Where things lie in a channel's memory, as offsets in bytes. Flags have lines of their own.
struct ChannelLayout {
  static constexpr int64_t kLine = 128;

  int64_t lanes, layers, rows, slots, hidden, depth;
  DType type;  // of x
  bool wide;   // ids are int64, else int32

  int64_t submit(int64_t lane, int64_t layer) const { return (lane * layers + layer) * 2 * kLine; }
  int64_t done(int64_t lane, int64_t layer) const { return submit(lane, layer) + kLine; }
  int64_t fault(int64_t lane) const { return (lanes * layers * 2 + lane) * kLine; }
  int64_t ids(int64_t lane, int64_t layer) const {
    return (lanes * layers * 2 + lanes) * kLine + (lane * depth + layer % depth) * payload_bytes();
  }
  int64_t weights(int64_t lane, int64_t layer) const { return ids(lane, layer) + line(ids_bytes(rows)); }
  int64_t x(int64_t lane, int64_t layer) const { return weights(lane, layer) + line(rows * slots * 4); }
  int64_t result(int64_t lane, int64_t layer) const { return x(lane, layer) + line(x_bytes(rows)); }
  int64_t bytes() const { return ids(lanes, 0); }

  int64_t ids_bytes(int64_t n) const { return n * slots * (wide ? 8 : 4); }
  int64_t x_bytes(int64_t n) const { return n * hidden * element_bytes(type); }

 private:
  static int64_t line(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
  int64_t payload_bytes() const {
    return line(ids_bytes(rows)) + line(rows * slots * 4) + line(x_bytes(rows)) + line(rows * hidden * 4);
  }
};

// Times of one layer's hand-off, nanoseconds of CLOCK_MONOTONIC.
struct LayerTimes {
  int64_t looked;        // the worker began to look for it
  int64_t seen;          // it was there
  int64_t began, ended;  // of the experts' work
  int64_t published;
  int64_t experts;  // distinct ones that were computed
  // Of its deferred experts, if there were any; else zero.
  int64_t later_began, later_ended, later_experts;
};

class Channel {
 public:
  // `memory` of layout.bytes() zeroed bytes, aligned to a line, and the experts of each layer must outlive
  // the channel, and a worker that close() left behind. With `defer` an id in [experts, 2 * experts) means
  // expert id - experts, computed after the layer's result is out and added to that of the next layer; the
  // last layer defers nothing. Throws std::invalid_argument.
  Channel(uint8_t* memory, const ChannelLayout& layout, std::vector<const Experts*> experts, int64_t limit_ns,
          bool defer = false);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // A step of the lane begins, with `rows` of the layout's rows. No graph of the lane is in flight. Throws
  // std::runtime_error where it cannot be served.
  void begin(int64_t lane, int64_t rows);
  // The GPU is through with the step, or with `abort` did not run all of it. Returns what went wrong, or "".
  std::string end(int64_t lane, bool abort);
  // Of the lane's last step, by layer; those that were not served are zero. Between end and begin.
  std::vector<LayerTimes> times(int64_t lane) const;

  // Ends worker and watchdog; steps in flight get an error. False: a worker is stuck and stays behind.
  bool close();

  // For tests: one fault at the next layer that fits (-1: any); random delays up to `ns` at every point.
  void inject(Point point, FaultKind kind, int64_t lane, int64_t layer, int64_t ns);
  void jitter(int64_t ns);
  int64_t workers() const;  // generations so far

 private:
  struct State;
  std::shared_ptr<State> state_;  // threads hold it too: one that is stuck may come back after the channel
};

// What the backend "hostfunc" launches, with the address of a flag: sets submit; waits for done and clears
// it.
void host_submit(void* flag);
void host_collect(void* flag);

}  // namespace hetero
