// Rows of activations: the types they arrive in, and the store that the kernels read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace hetero {

// Type of a tensor that the caller hands in.
enum class DType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

inline size_t element_bytes(DType type) { return type == DType::kF32 ? 4 : 2; }

// dst[i] = src[i * stride] in float32.
void widen(const void* src, DType type, int64_t n, int64_t stride, float* dst);

// What the kernels of a step read: int8 codes with their scales and sums, floats, bf16.
struct RowForm {
  bool codes, floats, halves;
};

// Rows of k_pad values in the forms that the kernels need.
struct RowStore {
  int64_t k_pad = 0;
  int8_t* q = nullptr;
  float* scale = nullptr;
  int32_t* sum = nullptr;
  float* f32 = nullptr;
  uint16_t* bf16 = nullptr;
  Rows at(int64_t row, int64_t rows) const;
  // Bytes of a store, and a store laid out from *cursor on, which moves behind it; 64-byte aligned parts.
  static size_t bytes(RowForm form, int64_t rows, int64_t k_pad);
  static RowStore carve(uint8_t** cursor, RowForm form, int64_t rows, int64_t k_pad);
};

constexpr size_t align64(size_t n) { return (n + 63) / 64 * 64; }

}  // namespace hetero
