#include "bulk.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

namespace hetero {
namespace {

// A huge page. Few threads bring them, some time ahead of the reads: of threads that write to one page at a
// time for the first time each clears one, and all but one are thrown away; and many that bring pages side by
// side stand in each other's way where a virtual machine's host has to find them.
constexpr int64_t kUnit = int64_t{2} << 20;
constexpr int64_t kAhead = 32;  // units
constexpr size_t kBringers = 2;
constexpr int64_t kRequest = int64_t{1} << 20;
constexpr int64_t kAlign = 4096;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, since Linux 5.14

int64_t size_of(const BulkBlock& block) { return block.stride * static_cast<int64_t>(block.sums.size()); }

}  // namespace

// Eight lanes of multiply and rotate over words, mixed at the end: any changed bit, and any exchange of
// words, changes it. No defence against somebody who wants two contents to look alike.
uint64_t checksum(const uint8_t* data, int64_t bytes) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ull;
  constexpr int64_t kLanes = 8;
  uint64_t lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = kOdd * static_cast<uint64_t>(i + 1);
  auto mix = [](uint64_t lane, uint64_t word) {
    const uint64_t h = (lane ^ word) * kOdd;
    return h << 29 | h >> 35;
  };
  int64_t at = 0;
  for (; at + 8 * kLanes <= bytes; at += 8 * kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      uint64_t word;
      std::memcpy(&word, data + at + 8 * i, 8);
      lanes[i] = mix(lanes[i], word);
    }
  }
  uint64_t all = static_cast<uint64_t>(bytes);
  for (const uint64_t lane : lanes) all = mix(all, lane);
  for (; at < bytes; ++at) all = mix(all, data[at]);
  return all ^ all >> 31;
}

BulkRead::BulkRead(int file, int direct, std::vector<BulkBlock> blocks, int threads)
    : file_(file), direct_(direct), blocks_(std::move(blocks)), use_direct_(direct >= 0) {
  for (const BulkBlock& block : blocks_) {
    const int64_t own = (size_of(block) + kUnit - 1) / kUnit;
    states_.push_back(std::make_unique<State>(own, block.sums.size()));
    for (std::atomic<int64_t>& left : states_.back()->bytes) left = block.stride;
    first_.push_back(units_);
    units_ += own;
  }
  try {
    brought_.resize(static_cast<size_t>(units_));
    for (size_t i = 0; units_ > 0 && i < kBringers; ++i) threads_.emplace_back([this] { bring(); });
    for (int i = 0; i < std::min<int64_t>(threads, units_); ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::exception&) {  // a limit of the system: those that there are read all
    if (threads_.size() <= kBringers) {
      stop();
      throw;
    }
  }
}

int64_t BulkRead::block_of(int64_t unit) const {
  return std::upper_bound(first_.begin(), first_.end(), unit) - first_.begin() - 1;
}

void BulkRead::bring() {
  std::unique_lock<std::mutex> held(lock_);
  while (bringing_ < units_) {
    const int64_t own = bringing_++;
    paced_.wait(held, [&] { return stopped_ || own < next_ + kAhead; });
    if (stopped_) return;
    held.unlock();
    const size_t number = static_cast<size_t>(block_of(own));
    const int64_t begin = (own - first_[number]) * kUnit;
    const int64_t bytes = std::min(kUnit, size_of(blocks_[number]) - begin);
    taken_.fetch_add(bytes, std::memory_order_relaxed);
    // Where the kernel cannot, the reads do it.
    madvise(blocks_[number].memory.data() + begin, static_cast<size_t>(bytes), kPopulateWrite);
    held.lock();
    brought_[static_cast<size_t>(own)] = 1;
    paced_.notify_all();
  }
}

void BulkRead::work() {
  std::unique_lock<std::mutex> held(lock_);
  while (next_ < units_) {
    const int64_t own = next_++;
    paced_.notify_all();
    paced_.wait(held, [&] { return stopped_ || brought_[static_cast<size_t>(own)] != 0; });
    if (stopped_) return;
    held.unlock();
    const int64_t block = block_of(own);
    unit(block, own - first_[static_cast<size_t>(block)]);
    held.lock();
  }
}

void BulkRead::unit(int64_t number, int64_t index) {
  const BulkBlock& block = blocks_[static_cast<size_t>(number)];
  State& state = *states_[static_cast<size_t>(number)];
  const int64_t begin = index * kUnit, end = std::min(begin + kUnit, size_of(block));
  uint8_t* const data = block.memory.data();
  BulkFault fault;
  bool good = true;
  for (int64_t at = begin; good && at < end; at += kRequest)
    good = read(block.offset + at, data + at, std::min(kRequest, end - at), &fault);
  if (!good) blame(&state, fault);
  for (int64_t expert = begin / block.stride; good && expert * block.stride < end; ++expert) {
    const int64_t from = std::max(begin, expert * block.stride);
    const int64_t to = std::min(end, (expert + 1) * block.stride);
    std::atomic<int64_t>& left = state.bytes[static_cast<size_t>(expert)];
    if (left.fetch_sub(to - from, std::memory_order_acq_rel) != to - from) continue;
    if (checksum(data + expert * block.stride, block.bytes) != block.sums[static_cast<size_t>(expert)])
      blame(&state, {BulkFault::kDamaged, expert});
  }
  read_.fetch_add(end - begin, std::memory_order_relaxed);
  if (state.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    const std::lock_guard<std::mutex> held(lock_);
    changed_.notify_all();
  }
}

bool BulkRead::read(int64_t offset, uint8_t* to, int64_t bytes, BulkFault* fault) {
  for (int64_t done = 0; done < bytes;) {
    // What direct reads have left in the middle of a block goes through the page cache.
    const bool direct = done % kAlign == 0 && use_direct_.load(std::memory_order_relaxed);
    const ssize_t count = pread(direct ? direct_ : file_, to + done, static_cast<size_t>(bytes - done),
                                static_cast<off_t>(offset + done));
    if (count > 0) {
      done += count;
    } else if (count < 0 && errno == EINTR) {
      continue;
    } else if (count < 0 && direct) {
      use_direct_.store(false, std::memory_order_relaxed);
    } else {
      *fault = count == 0 ? BulkFault{BulkFault::kEnds, offset + done} : BulkFault{BulkFault::kErrno, errno};
      return false;
    }
  }
  return true;
}

void BulkRead::blame(State* state, BulkFault fault) {
  const std::lock_guard<std::mutex> held(lock_);
  if (state->fault.kind == BulkFault::kNone) state->fault = fault;
}

std::optional<BulkFault> BulkRead::wait(int64_t block, double seconds) {
  State& state = *states_.at(static_cast<size_t>(block));
  std::unique_lock<std::mutex> held(lock_);
  auto over = [&] { return state.left.load(std::memory_order_acquire) == 0 || stopped_; };
  if (!changed_.wait_for(held, std::chrono::duration<double>(seconds), over)) return std::nullopt;
  if (state.left.load(std::memory_order_acquire) != 0) return BulkFault{BulkFault::kErrno, ECANCELED};
  return state.fault;
}

void BulkRead::stop() {
  {
    const std::lock_guard<std::mutex> held(lock_);
    stopped_ = true;
    changed_.notify_all();
    paced_.notify_all();
  }
  const std::lock_guard<std::mutex> one(joining_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (BulkBlock& block : blocks_) block.memory = Arena();
}

}  // namespace hetero
