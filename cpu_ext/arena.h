// Memory of the packed experts, and of the workspace of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

namespace hetero {

// Anonymous memory, zeroed, aligned to a huge page and advised to use huge pages. Pages are taken from the
// system when they are first written, so a large arena costs nothing until experts arrive.
class Arena {
 public:
  Arena() = default;
  // Throws std::bad_alloc when the system refuses the mapping. `node`: the memory node that its pages shall
  // come from, by the kernel's number; -1 leaves that to the kernel. A refusal of the kernel to bind is no
  // error: bind_error() tells it.
  explicit Arena(size_t bytes, int node = -1);
  // A copy is of the same memory, which ends with the last of them.

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  int node() const { return node_; }
  int bind_error() const { return bind_error_; }  // errno of mbind, 0 where it was not asked for or succeeded

  // Where the kernel says that the pages are: node -> pages, of at most `most` pages taken evenly; negative
  // keys are errors of single pages, -ENOENT those not touched yet. Throws std::system_error when the kernel
  // does not tell.
  std::map<int, int64_t> page_nodes(size_t most) const;

  // Grows to at least `bytes`; the contents are lost when it does.
  void reserve(size_t bytes);

 private:
  std::shared_ptr<void> mapping_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  int node_ = -1;
  int bind_error_ = 0;
};

}  // namespace hetero
