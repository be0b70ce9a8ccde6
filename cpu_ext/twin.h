// A thread in the place of a GPU's stream: plays a recorded list of operations, as often as it is launched.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hetero {

// Operations are recorded first and replayed with their constants, like a captured graph. Writes are ordered
// behind all that came before them, waits before all that comes after.
class Twin {
 public:
  Twin() = default;
  ~Twin();
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  void copy(void* to, const void* from, int64_t bytes);
  void write(void* flag, uint32_t value);
  void wait(void* flag, uint32_t value);  // until it holds exactly this
  void pause(int64_t ns);                 // kernels that take so long
  // Random delays up to `ns` before every operation.
  void jitter(int64_t ns) { jitter_.store(ns); }

  // Plays the list once more; replays do not overlap. Throws std::runtime_error while one is in flight.
  void launch();
  // False where it is not through after `seconds`.
  bool synchronize(double seconds);
  // Gives up waits of the replay in flight.
  void abort() { abort_.store(true); }
  // Nanoseconds that the last replay took.
  int64_t last_ns() const { return last_ns_.load(); }

 private:
  enum class Kind { kCopy, kWrite, kWait, kPause };
  struct Op {
    Kind kind;
    void* to;
    const void* from;
    int64_t n;
  };
  void main();
  void play();

  std::vector<Op> ops_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t launched_ = 0, played_ = 0;
  bool stop_ = false;
  std::atomic<bool> abort_{false};
  std::atomic<int64_t> jitter_{0}, last_ns_{0};
  uint64_t random_ = 0;
};

}  // namespace hetero
