// Experts read from a file into their arenas by threads of their own, which need nothing of Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "arena.h"

namespace hetero {

// 64 bits of some memory, against faults and mistakes; runs at the speed of memory.
uint64_t checksum(const uint8_t* data, int64_t bytes);

// A block of `sums.size()` experts that stand one after the other, `stride` apart, in the file from `offset`
// on and from the beginning of `memory`; the checksum of each is of its first `bytes`. All but `bytes` are
// multiples of 4096.
struct BulkBlock {
  int64_t offset, stride, bytes;
  std::vector<uint64_t> sums;
  Arena memory;  // which is there until the reads have ended, whoever else gives it up
};

struct BulkFault {
  enum Kind : int { kNone, kErrno, kEnds, kDamaged };
  Kind kind = kNone;
  int64_t value = 0;  // the errno, the byte at which the file ends, or the expert whose checksum differs
};

class BulkRead {
 public:
  // Begins at once, in the order of the blocks. `file` and `direct` are descriptors of one file that stay
  // open until the reads have ended; what `direct` (-1: none) refuses is read from `file`.
  BulkRead(int file, int direct, std::vector<BulkBlock> blocks, int threads);
  ~BulkRead() { stop(); }
  BulkRead(const BulkRead&) = delete;
  BulkRead& operator=(const BulkRead&) = delete;

  // Waits for a block, so many seconds at most; returns the first fault of it, nothing where it is still
  // being read. After `stop`, of a block that was not read, kErrno with ECANCELED.
  std::optional<BulkFault> wait(int64_t block, double seconds);
  // Ends the reads, where they are; what has begun is waited for, and the memory let go.
  void stop();
  int64_t read_bytes() const { return read_.load(std::memory_order_relaxed); }
  // Bytes whose pages have been asked of the system.
  int64_t taken_bytes() const { return taken_.load(std::memory_order_relaxed); }

 private:
  struct State {
    std::atomic<int64_t> left;                // units
    std::vector<std::atomic<int64_t>> bytes;  // that each expert still lacks
    BulkFault fault;
    State(int64_t units, size_t experts) : left(units), bytes(experts) {}
  };

  int64_t block_of(int64_t unit) const;
  void bring();
  void work();
  void unit(int64_t block, int64_t index);
  bool read(int64_t offset, uint8_t* to, int64_t bytes, BulkFault* fault);
  void blame(State* state, BulkFault fault);

  const int file_, direct_;
  std::vector<BulkBlock> blocks_;
  std::vector<std::unique_ptr<State>> states_;
  std::vector<int64_t> first_;  // unit of each block, of all
  std::atomic<int64_t> read_{0}, taken_{0};
  std::atomic<bool> use_direct_;
  std::mutex lock_;  // of faults and of what follows
  bool stopped_ = false;
  int64_t units_ = 0, bringing_ = 0, next_ = 0;  // of all blocks
  std::vector<char> brought_;                    // by unit
  std::condition_variable changed_, paced_;      // a block is read or all stop; a unit is brought or begun
  std::mutex joining_;
  std::vector<std::thread> threads_;
};

}  // namespace hetero
