#include "twin.h"

#include <sched.h>
#include <time.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

namespace hetero {
namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void spin(int64_t ns) {
  for (const int64_t until = now_ns() + ns; now_ns() < until;) __builtin_ia32_pause();
}

}  // namespace

Twin::~Twin() {
  abort();
  {
    std::lock_guard<std::mutex> hold(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Twin::copy(void* to, const void* from, int64_t bytes) { ops_.push_back({Kind::kCopy, to, from, bytes}); }
void Twin::write(void* flag, uint32_t value) { ops_.push_back({Kind::kWrite, flag, nullptr, value}); }
void Twin::wait(void* flag, uint32_t value) { ops_.push_back({Kind::kWait, flag, nullptr, value}); }
void Twin::pause(int64_t ns) { ops_.push_back({Kind::kPause, nullptr, nullptr, ns}); }

void Twin::launch() {
  std::lock_guard<std::mutex> hold(mutex_);
  if (launched_ != played_) throw std::runtime_error("the last replay is still in flight");
  abort_.store(false);
  if (!thread_.joinable()) thread_ = std::thread([this] { main(); });
  ++launched_;
  changed_.notify_all();
}

bool Twin::synchronize(double seconds) {
  std::unique_lock<std::mutex> hold(mutex_);
  return changed_.wait_for(hold, std::chrono::duration<double>(seconds),
                           [&] { return launched_ == played_; });
}

void Twin::main() {
  std::unique_lock<std::mutex> hold(mutex_);
  for (;;) {
    changed_.wait(hold, [&] { return stop_ || launched_ != played_; });
    if (stop_) return;
    hold.unlock();
    const int64_t start = now_ns();
    play();
    last_ns_.store(now_ns() - start);
    hold.lock();
    played_ = launched_;
    changed_.notify_all();
  }
}

void Twin::play() {
  random_ += static_cast<uint64_t>(now_ns());
  for (const Op& op : ops_) {
    if (const int64_t most = jitter_.load(std::memory_order_relaxed); most > 0) {
      random_ = random_ * 6364136223846793005u + 1442695040888963407u;
      const uint64_t r = random_ >> 33;
      if (r % 4 == 0) sched_yield();
      if (r % 4 == 1) spin(static_cast<int64_t>((r >> 2) % static_cast<uint64_t>(most)));
    }
    std::atomic<uint32_t>* flag = static_cast<std::atomic<uint32_t>*>(op.to);
    switch (op.kind) {
      case Kind::kCopy:
        std::memcpy(op.to, op.from, static_cast<size_t>(op.n));
        break;
      case Kind::kWrite:
        flag->store(static_cast<uint32_t>(op.n), std::memory_order_release);
        break;
      case Kind::kWait: {
        const int64_t start = now_ns();
        while (flag->load(std::memory_order_acquire) != static_cast<uint32_t>(op.n) && !abort_.load()) {
          if (now_ns() - start > 10'000) {
            sched_yield();
          } else {
            __builtin_ia32_pause();
          }
        }
        break;
      }
      case Kind::kPause:
        spin(op.n);
        break;
    }
  }
}

}  // namespace hetero
