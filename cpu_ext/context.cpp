#include "context.h"

#include <pthread.h>

#include <atomic>
#include <stdexcept>
#include <utility>

namespace hetero {
namespace {

// Fork handlers have no argument, so these need names at file scope.
std::atomic<Context*> process_context{nullptr};
Context* forking = nullptr;

void before_fork() {
  forking = process_context.load();
  forking->lock.lock();
}
void after_fork_in_parent() { forking->lock.unlock(); }
void after_fork_in_child() {
  forking->pool->after_fork_in_child();
  forking->lock.unlock();
}

}  // namespace

Context& context() {
  Context* current = process_context.load(std::memory_order_acquire);
  if (current == nullptr) throw std::runtime_error("the extension is not initialised");
  return *current;
}

Held::Held() {
  do {
    context_ = &context();
    lock_ = std::unique_lock<std::mutex>(context_->lock);
  } while (context_ != &context());
}

void init_context() {
  process_context.store(new Context(1));
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void renew_context(Context& stuck) {
  Context* fresh = new Context(1);
  {
    std::lock_guard<std::mutex> hold(stuck.swap);
    delete fresh->pool;
    fresh->pool = new Pool(stuck.pool->seats());
    fresh->tuning = stuck.tuning;
  }
  Context* expected = &stuck;
  if (!process_context.compare_exchange_strong(expected, fresh)) delete fresh;
}

uint64_t pool_progress(Context& of) {
  std::lock_guard<std::mutex> hold(of.swap);
  return of.pool->progress();
}

void seat(std::vector<Seat> seats) {
  const Held own;
  Pool* fresh = new Pool(std::move(seats));
  Pool* old = own->pool;
  {
    std::lock_guard<std::mutex> swap(own->swap);
    own->pool = fresh;
  }
  delete old;
}

}  // namespace hetero
