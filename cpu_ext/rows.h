// Rows of activations: the types they arrive in, and the store that the kernels read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace hetero {

// Type of a tensor that the caller hands in.
enum class DType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

inline size_t element_bytes(DType type) { return type == DType::kF32 ? 4 : 2; }

// dst[i] = src[i * stride] in float32.
void widen(const void* src, DType type, int64_t n, int64_t stride, float* dst);

// dst[i] = src[order[i]] in float32.
void widen_in_order(const void* src, DType type, const int32_t* order, int64_t n, float* dst);

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

// Rows whose values fill whole tiles.
constexpr int64_t tile_rows(int64_t rows) { return (rows + 15) / 16 * 16; }
// Copies rows of k_pad bf16 to tiles, see Rows: tile_rows(rows) * k_pad values. row(m) is where row m begins.
template <class Row>
void lay_tiles(int64_t rows, int64_t k_pad, uint16_t* to, Row row) {
  for (int64_t m = 0; m < rows; ++m) {
    const uint16_t* from = row(m);
    uint16_t* at = to + m / 16 * 16 * k_pad + m % 16 * 32;
    for (int64_t k = 0; k < k_pad; k += 32, at += 512) std::memcpy(at, from + k, 64);
  }
}

constexpr size_t align64(size_t n) { return (n + 63) / 64 * 64; }

}  // namespace hetero
