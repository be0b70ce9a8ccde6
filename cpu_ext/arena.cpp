#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace hetero {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Where memory gets its node: an arena is bound here before its first page is touched.
void bind_to_node(void* /*data*/, size_t /*bytes*/) {}

}  // namespace

Arena::Arena(size_t bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  size_ = (bytes + 4095) / 4096 * 4096;
  const bool huge = size_ >= kHugePage;
  mapped_ = size_ + (huge ? kHugePage : 0);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  if (huge) start = (start + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<uint8_t*>(start);
  if (huge) madvise(data_, size_, MADV_HUGEPAGE);  // advice: without huge pages the same bytes, slower
  bind_to_node(data_, size_);
}

Arena::~Arena() { release(); }

void Arena::release() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
  mapping_ = nullptr;
  data_ = nullptr;
  size_ = mapped_ = 0;
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  release();
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  mapping_ = std::exchange(other.mapping_, nullptr);
  mapped_ = std::exchange(other.mapped_, 0);
  return *this;
}

void Arena::reserve(size_t bytes) {
  if (bytes > size_) *this = Arena(bytes + std::min(bytes / 4, size_t{4} << 20));
}

}  // namespace hetero
