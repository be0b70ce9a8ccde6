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
  kPackKeptOnly = 3,   // the format only keeps values that are quantised so already
};

// False where the combination does not exist: a group that the format has not (see Layout), n or k below 1,
// k above 2^19.
bool make_layout(int32_t format, int32_t group, int64_t n, int64_t k, Layout* layout);
inline int64_t block_count(const Layout& layout) { return layout.n_pad / kBlockRows; }
inline int64_t packed_bytes(const Layout& layout) { return block_count(layout) * layout.block_bytes; }

// One expert: [gate block][up block] interleaved (up alone without a gate), then the down blocks, then
// float32 biases (gate, up, down) where it has them; a multiple of 64.
int64_t expert_bytes(const Layout& up, const Layout& down, bool has_gate, bool has_bias, bool ordered);

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

// Values that are quantised already: codes [n][k], one a byte, with G = ceil(k / group), S = ceil(k / 256):
//   int8, int4, int4a   code = value + 128, value + 8, 0 to 15; scales fp16 [n][G]; int4a: extra fp16, minima
//                       alike
//   fp8                 the E4M3 byte; scales float32 [ceil(n / 128)][G]; fp8_row: [n]
//   mxfp4               scales E8M0 [n][G]
//   nvfp4               scales E4M3 [n][G]; extra one float32, the scale of the matrix
//   int8a, iq4_nl       as int4a, as int4
//   int4z, int8z        scales fp16 [n][G]; extra uint8 [n][G], zeros
//   q4_k, q5_k, q2_k    scales uint8 [n][G][2] (scale, minimum); extra fp16 [n][S][2] (d, dmin)
//   q3_k, q6_k          code = value + 8, value + 128; scales int8 [n][G]; extra fp16 [n][S]
//   other iq types      scales int8 [n][G]; extra fp16 [n][S]
struct Quantised {
  const uint8_t* codes;
  const void *scales, *extra;
};
// What of it the format cannot hold, nullptr where nothing.
const char* wrong_codes(const Layout& layout, const Quantised& q);

// The same of the 16 rows of a block, each where it lies; nullptr for a row beyond n. Codes are of k, scales
// and extras of G and S of a row. fp8: all scales are those of its row of tiles; nvfp4: all extras the one
// number. What is not aligned to its type is read all the same.
struct CodeRows {
  const uint8_t* codes[kBlockRows];
  const uint8_t* scales[kBlockRows];
  const uint8_t* extra[kBlockRows];
};
// Packs a block without changing any value. The codes must be such as wrong_codes finds nothing in.
void pack_code_rows(const Layout& layout, const CodeRows& rows, uint8_t* out);
// Packs block `block` of a matrix.
void pack_codes_block(const Layout& layout, int64_t block, const Quantised& q, uint8_t* out);

// Bytes of a row's scales and extra in Quantised, 0 where the format has them by the matrix.
int64_t row_scale_bytes(const Layout& layout);
int64_t row_extra_bytes(const Layout& layout);

// Decodes block `block` at w to float32: rows 16 * block .. of out, whose rows are `ld` floats apart; only
// rows below n and columns below k are written.
void unpack_block(const Layout& layout, int64_t block, const uint8_t* w, float* out, int64_t ld);

}  // namespace hetero
