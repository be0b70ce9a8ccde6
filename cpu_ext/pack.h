// Layouts of packed matrices, and the way of weights into and out of them.
#pragma once

#include "kernels.h"

namespace hetero {

enum SourceType : int32_t { kSourceF32 = 0, kSourceBf16 = 1, kSourceF16 = 2 };

// A matrix of n x k values anywhere in memory; strides in elements, any sign.
struct Source {
  const void* data;
  int32_t type;
  int64_t row_stride, col_stride;
};

enum PackStatus : int32_t {
  kPackOk = 0,
  kPackNotFinite = 1,  // a NaN or an infinity among the weights
  kPackOverflow = 2,   // a value, scale or minimum beyond the range of its 16-bit float
};

// False where the combination does not exist (group of f32 or bf16 other than 0, group not 32, 64 or 128,
// n or k below 1).
bool make_layout(int32_t format, int32_t group, int64_t n, int64_t k, Layout* layout);
inline int64_t block_count(const Layout& layout) { return layout.n_pad / kBlockRows; }
inline int64_t packed_bytes(const Layout& layout) { return block_count(layout) * layout.block_bytes; }

// One expert: [gate block][up block] interleaved (up alone without a gate), then the down blocks, then
// float32 biases (gate, up, down) where it has them; a multiple of 64.
int64_t expert_bytes(const Layout& up, const Layout& down, bool has_gate, bool has_bias);

// Packs block `block` (16 rows of the source; rows beyond n are zero) into out[0 .. block_bytes).
// Blocks are independent of each other, so that callers may share them among threads.
PackStatus pack_block(const Layout& layout, int64_t block, const Source& source, uint8_t* out);

// Packs values that are quantised already, without changing any: unsigned codes [n][k] (int4: 0 to 15,
// int8: value + 128), fp16 scales [n][ceil(k / group)] and, for int4a, fp16 minima of the same shape.
void pack_codes_block(const Layout& layout, int64_t block, const uint8_t* codes, const uint16_t* scales,
                      const uint16_t* minima, uint8_t* out);

// Decodes block `block` at w to float32: rows 16 * block .. of out, whose rows are `ld` floats apart; only
// rows below n and columns below k are written.
void unpack_block(const Layout& layout, int64_t block, const uint8_t* w, float* out, int64_t ld);

}  // namespace hetero
