#include "arena.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <vector>

namespace hetero {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Binds memory to a node before its first page is touched; returns 0 or errno. Bound, not preferred: a node
// full of page cache then gives that up, where a preference would take pages of another node.
int bind_to_node(void* data, size_t bytes, int node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<size_t>(node) / kBits + 1);
  mask.back() = 1ul << static_cast<size_t>(node) % kBits;
  // The kernel reads one bit less than it is told.
  return syscall(SYS_mbind, data, bytes, MPOL_BIND, mask.data(), mask.size() * kBits + 1, 0) == 0 ? 0 : errno;
}

}  // namespace

Arena::Arena(size_t bytes, int node) : node_(node) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  size_ = (bytes + 4095) / 4096 * 4096;
  const bool huge = size_ >= kHugePage;
  const size_t mapped = size_ + (huge ? kHugePage : 0);
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = std::shared_ptr<void>(mapping, [mapped](void* all) { munmap(all, mapped); });
  uintptr_t start = reinterpret_cast<uintptr_t>(mapping);
  if (huge) start = (start + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<uint8_t*>(start);
  if (huge) madvise(data_, size_, MADV_HUGEPAGE);  // advice: without huge pages the same bytes, slower
  if (node >= 0) bind_error_ = bind_to_node(data_, size_, node);
}

std::map<int, int64_t> Arena::page_nodes(size_t most) const {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), pages = size_ / page;
  const size_t count = std::min(pages, most);
  std::vector<void*> addresses(count);
  std::vector<int> status(count);
  for (size_t i = 0; i < count; ++i) addresses[i] = data_ + pages * i / count * page;
  std::map<int, int64_t> nodes;
  if (count == 0) return nodes;
  if (syscall(SYS_move_pages, 0, count, addresses.data(), nullptr, status.data(), 0) != 0) {
    throw std::system_error(errno, std::generic_category(), "move_pages");
  }
  for (const int s : status) ++nodes[s];
  return nodes;
}

void Arena::reserve(size_t bytes) {
  if (bytes > size_) *this = Arena(bytes + std::min(bytes / 4, size_t{4} << 20), node_);
}

}  // namespace hetero
