// Products on tiles of bf16 over a policy T of tiles, for any number of rows: weights are decoded to bf16
// with their scales folded in, and the sums stay in the tiles. See amx_kernels.h for what else T has.
//
// T::configure_pair(first, second): tiles 0 and 2, results and activations, have `first` rows, 1 and 3
//   `second`, or where that is 0 tile 1 `first` and 3 none; 4 is weights; all 64 bytes wide.
// T::dot_bf16<result, a, b>()
// T::Decoder<Format>(block, layout): decodes chunks of 32 k of a block to tiles of bf16, [16 pairs of k][16
//   outputs][2], scales and zero points applied (of nvfp4 without the scale of the whole matrix, so that they
//   are exact, as those of mxfp4 are). begin(c, to) starts chunk c; step(i) for i = 0 .. 3 writes a
//   quarter of the tile each. It may truncate where it multiplies by kCentre.
#pragma once

#include "codes.h"
#include "exact.h"
#include "kernels.h"

namespace hetero {
namespace {

// Truncated to bf16, a value loses 2^-8 of its binade on average; multiplied by this before, it loses nothing
// on average and errs as much as one that is rounded (rms 0.0016 of the value).
constexpr float kCentre = 1.0f + 1.0f / 384;

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;  // 32 k x 16 outputs, or 16 rows x 32 k
constexpr int64_t kLead = 2;          // chunks that decoding is ahead of the products
constexpr int64_t kSlots = 4;  // decoded chunks of two blocks that are kept where no other rows need them
// Chunks that are decoded for more rows than the tiles hold: with the activations that pass by, what the
// first cache takes.
constexpr int64_t kPanel = 8;

// Bytes of 32 k of a block.
template <int Format>
constexpr int64_t chunk_bytes() {
  return kTraits[Format].bits * 64;
}

// Two tiles of rows against one block, or one tile of rows against one or two blocks, over the chunks
// [first, last). Two by two would load fewer tiles a product, and was slower on 16 cores (docs/perf.md).
template <class T, int Format, int RowTiles, int Blocks>
struct Product {
  const uint8_t* w;
  const Layout* layout;
  const uint16_t* x;  // tiles of the first 16 rows; the next 16 follow
  uint8_t* scratch;
  int64_t first, last, slots;

  uint16_t* slot(int64_t c, int block) const {
    return reinterpret_cast<uint16_t*>(scratch + ((c - first) % slots * 2 + block) * kTileBytes);
  }
  const void* weights(int64_t c, int block) const {
    if (Format == kBf16) return w + block * layout->block_bytes + c * kTileBytes;
    return slot(c, block);
  }
  // The tile products of chunk c in two parts.
  void part(int64_t c, int i) const {
    const uint16_t* a = x + c * (kTileBytes / 2);
    if (i == 0) {
      T::template load<2>(a, 64);
      T::template load<4>(weights(c, 0), 64);
      T::template dot_bf16<0, 2, 4>();
    } else if (RowTiles == 2) {
      T::template load<3>(a + layout->k_pad * kTileRows, 64);
      T::template dot_bf16<1, 3, 4>();
    } else if (Blocks == 2) {
      T::template load<4>(weights(c, 1), 64);
      T::template dot_bf16<1, 2, 4>();
    }
  }
  void whole(int64_t c) const {
    part(c, 0);
    part(c, 1);
  }

  void multiply() const {
    for (int64_t c = first; c < last; c++) whole(c);
  }

  // Decodes ahead of the products; the products of a chunk stand between the steps of decoding another, so
  // that the units for either have work.
  void decode_and_multiply() const {
    // Into the second cache what the blocks after these will need, an equal part with every chunk.
    const int64_t stream = Blocks * layout->block_bytes;
    const int64_t ahead = (stream / (layout->k_pad / 32) + 63) / 64 * 64;
    const uint8_t* far = w + stream + first * ahead;
    auto fetch = [&] {
      for (int64_t line = 0; line < ahead; line += 64) T::V::prefetch_far(far + line);
      far += ahead;
    };
    if constexpr (Format == kBf16) {
      for (int64_t c = first; c < last; c++) {
        fetch();
        whole(c);
      }
    } else {
      typename T::template Decoder<Format> one(w, layout),
          two(w + (Blocks - 1) * layout->block_bytes, layout);
      const int64_t lead = last - first < kLead ? last - first : kLead;
      for (int64_t c = first; c < last; c++) {
        const bool behind = c >= first + lead;
        fetch();
        one.begin(c, slot(c, 0));
        one.step(0);
        if (Blocks == 1 && behind) part(c - lead, 0);
        one.step(1);
        one.step(2);
        if (behind) part(c - lead, Blocks == 1 ? 1 : 0);
        one.step(3);
        if (Blocks == 1) continue;
        two.begin(c, slot(c, 1));
        two.step(0);
        two.step(1);
        if (behind) part(c - lead, 1);
        two.step(2);
        two.step(3);
      }
      for (int64_t c = last - lead; c < last; c++) whole(c);
    }
  }

  // y: the results' place; between panels of chunks also where the sums wait.
  void run(float* y, int64_t ldy, bool decode) const {
    const int64_t bytes = ldy * static_cast<int64_t>(sizeof(float));
    float* other = RowTiles == 2 ? y + kTileRows * ldy : y + kBlockRows;
    constexpr bool kBoth = RowTiles == 2 || Blocks == 2;
    if (first == 0) {
      T::template zero<0>();
      if (kBoth) T::template zero<1>();
    } else {
      T::template load<0>(y, bytes);
      if (kBoth) T::template load<1>(other, bytes);
    }
    if (decode)
      decode_and_multiply();
    else
      multiply();
    T::template store<0>(y, bytes);
    if (kBoth) T::template store<1>(other, bytes);
  }
};

template <class T, int Format>
void tile_bulk(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
               void* scratch) {
  const int64_t chunks = layout->k_pad / 32, rows = x->rows;
  const bool once = rows <= 2 * kTileRows, wide = once && rows > kTileRows;
  const int64_t panel = once ? chunks : kPanel, slots = once ? kSlots : kPanel;
  const int64_t row_step = wide ? 2 * kTileRows : kTileRows, block_step = wide ? 1 : 2;
  int64_t first_now = -1, second_now = -1;
  for (int64_t b = 0; b < blocks; b += block_step)
    for (int64_t c = 0; c < chunks; c += panel)
      for (int64_t m = 0; m < rows; m += row_step) {
        const int64_t left = rows - m, first = left < kTileRows ? left : kTileRows;
        const int64_t second = wide ? left - first : 0;  // then all rows are in one round
        if (first != first_now || second != second_now) T::configure_pair(first, second);
        first_now = first, second_now = second;
        auto run = [&](auto product) {
          product.w = w + b * layout->block_bytes;
          product.layout = layout;
          product.x = x->tiles + m * layout->k_pad;
          product.scratch = static_cast<uint8_t*>(scratch);
          product.first = c;
          product.last = c + panel < chunks ? c + panel : chunks;
          product.slots = slots;
          product.run(y + m * ldy + b * kBlockRows, ldy, m == 0);
        };
        if (second != 0)
          run(Product<T, Format, 2, 1>());
        else if (!wide && b + 1 < blocks)
          run(Product<T, Format, 1, 2>());
        else
          run(Product<T, Format, 1, 1>());
      }
  T::release();
  if (Format == kNvfp4) {  // the blocks may be of several matrices in turn
    using V = typename T::V;
    for (int64_t b = 0; b < blocks; b++) {
      const uint8_t* matrix = w + b * layout->block_bytes + layout->min_offset;
      const typename V::F scale = V::set1(float_at(matrix) * 128.0f);
      for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < kBlockRows; n += V::kLanes) {
          float* at = y + m * ldy + b * kBlockRows + n;
          V::store(at, V::mul(V::load(at), scale));
        }
    }
  }
}

}  // namespace
}  // namespace hetero
