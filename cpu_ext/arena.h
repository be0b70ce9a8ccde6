// Memory of the packed experts, and of the workspace of a step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero {

// Anonymous memory, zeroed, aligned to a huge page and advised to use huge pages. Pages are taken from the
// system when they are first written, so a large arena costs nothing until experts arrive.
class Arena {
 public:
  Arena() = default;
  // Throws std::bad_alloc when the system refuses the mapping.
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // Grows to at least `bytes`; the contents are lost when it does.
  void reserve(size_t bytes);

 private:
  void release();
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace hetero
