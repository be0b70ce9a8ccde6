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

// False where the combination does not exist: a group that the format has not (see Layout), n or k below 1,
// k above 2^19.
bool make_layout(int32_t format, int32_t group, int64_t n, int64_t k, Layout* layout);
inline int64_t block_count(const Layout& layout) { return layout.n_pad / kBlockRows; }
inline int64_t packed_bytes(const Layout& layout) { return block_count(layout) * layout.block_bytes; }

// One expert: [gate block][up block] interleaved (up alone without a gate), then the down blocks, then
// float32 biases (gate, up, down) where it has them; a multiple of 64.
int64_t expert_bytes(const Layout& up, const Layout& down, bool has_gate, bool has_bias);

// What packing a block must know of other blocks: the scales of fp8, by block and 128 k, and the scale of the
// matrix of nvfp4, by block. First every block is measured into its part of `shared` (shared_per_block floats
// each, none for the other formats), then settle_shared is called once. Blocks are independent of each other,
// so that callers may share them among threads.
int64_t shared_per_block(const Layout& layout);
PackStatus measure_block(const Layout& layout, int64_t block, const Source& source, float* shared);
void settle_shared(const Layout& layout, float* shared);

// Packs block `block` (16 rows of the source; rows beyond n are zero) into out[0 .. block_bytes).
PackStatus pack_block(const Layout& layout, int64_t block, const Source& source, const float* shared,
                      uint8_t* out);

// Values that are quantised already: codes [n][k] (int4, int4a, mxfp4, nvfp4: 0 to 15; int8: value + 128;
// fp8: the E4M3 byte) with
//   int8, int4, int4a   scales fp16 [n][ceil(k / group)]; int4a: extra fp16, minima of the same shape
//   fp8                 scales float32 [ceil(n / 128)][ceil(k / 128)]
//   mxfp4               scales E8M0 [n][ceil(k / 32)]
//   nvfp4               scales E4M3 [n][ceil(k / 16)]; extra one float32, the scale of the matrix
struct Quantised {
  const uint8_t* codes;
  const void *scales, *extra;
};
// What of it the format cannot hold, nullptr where nothing.
const char* wrong_codes(const Layout& layout, const Quantised& q);
// Packs block `block` without changing any value.
void pack_codes_block(const Layout& layout, int64_t block, const Quantised& q, uint8_t* out);

// Decodes block `block` at w to float32: rows 16 * block .. of out, whose rows are `ld` floats apart; only
// rows below n and columns below k are written.
void unpack_block(const Layout& layout, int64_t block, const uint8_t* w, float* out, int64_t ld);

}  // namespace hetero
