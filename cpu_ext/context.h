// The one context (pool, lock, workspace) of the process.
#pragma once

#include "moe.h"

namespace hetero {

// Throws std::runtime_error before init_context().
Context& context();

// The process's context with its lock held. A thread that waited for the lock of a context that was renewed
// meanwhile waits for the new one.
class Held {
 public:
  Held();
  Context* operator->() const { return context_; }

 private:
  Context* context_;
  std::unique_lock<std::mutex> lock_;
};

// Makes the context, and keeps it usable in the child of a fork. Once, at import.
void init_context();

// Puts a context with the same seats and tuning in the place of one whose lock is held by a thread that does
// not come back. Does nothing where `stuck` is no longer the process's. The old one is not freed: something
// may still use it. Takes no lock that a step holds.
void renew_context(Context& stuck);

// Changes whenever a thread of the context's pool begins a chunk.
uint64_t pool_progress(Context& of);

// Replaces the pool of the process's context.
void seat(std::vector<Seat> seats);

}  // namespace hetero
