// Products on tiles of bf16 over a policy T of tiles, for any number of rows: weights are decoded to bf16
// with their scales folded in, and the sums stay in the tiles. See amx_kernels.h for what else T has.
//
// T::configure_pair(first, second): tiles 0 and 2, results and activations, have `first` rows, 1 and 3
//   `second`, or where that is 0 tile 1 `first` and 3 none; 4 is weights; all 64 bytes wide.
// T::own(p): fetches a line that will be written.
// T::configure_full(): all tiles have 16 rows of 64 bytes.
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

// Chunks of two blocks that a stage multiplies, and that are decoded while the stage before multiplies.
constexpr int64_t kDeep = 40;
constexpr int64_t kStageBytes = 2 * kDeep * kTileBytes;
constexpr int64_t kRestAt = 2 * kStageBytes;  // where the sums of a tile that has rows too many are
static_assert(kRestAt + 2 * kTileBytes <= kScratchBytes, "scratch of two stages");

// Decodes the chunks [first, last) of two blocks, side by side, a quarter of a tile with each step. While
// tiles multiply, vector operations have one of their two ports, so each product leaves room for 16 of them:
// steps, which have about 25, stand apart from each other, not a tile's together.
template <class T, int Format>
class Ahead {
 public:
  Ahead(const uint8_t* w, const Layout* layout, int64_t first, int64_t last, uint16_t* to)
      : one_(w, layout),
        two_(w + layout->block_bytes, layout),
        at_(w + first * chunk_bytes<Format>()),
        block_bytes_(layout->block_bytes),
        chunk_(first),
        last_(last),
        to_(to) {}
  bool more() const { return chunk_ < last_; }
  __attribute__((noinline)) void step() {
    typename T::template Decoder<Format>& decoder = block_ == 0 ? one_ : two_;
    if (step_ == 0) {
      for (int64_t line = 0; line < chunk_bytes<Format>(); line += 64)  // of the two blocks after these
        T::V::prefetch_far(at_ + (block_ + 2) * block_bytes_ + line);
      decoder.begin(chunk_, to_);
    }
    decoder.step(step_);
    if (++step_ < 4) return;
    step_ = 0;
    to_ += kTileBytes / 2;
    block_ ^= 1;
    if (block_ == 1) return;
    chunk_++;
    at_ += chunk_bytes<Format>();
  }

 private:
  typename T::template Decoder<Format> one_, two_;
  const uint8_t* at_;
  int64_t block_bytes_, chunk_, last_;
  uint16_t* to_;
  int step_ = 0, block_ = 0;
};

// bf16 is multiplied where it lies, and only fetched ahead.
template <class T>
class Ahead<T, kBf16> {
 public:
  Ahead(const uint8_t* w, const Layout* layout, int64_t first, int64_t last, uint16_t*)
      : at_(w + first * kTileBytes), end_(w + last * kTileBytes), block_bytes_(layout->block_bytes) {}
  bool more() const { return at_ < end_; }
  void step() {
    for (int64_t line = 0; line < kTileBytes / 8; line += 64) {
      T::V::prefetch_far(at_ + line);
      T::V::prefetch_far(at_ + block_bytes_ + line);
    }
    at_ += kTileBytes / 8;
  }

 private:
  const uint8_t *at_, *end_;
  int64_t block_bytes_;
};

// Spreads the steps of a stage, 8 a chunk, over its products, two for each tile of rows.
template <class A>
struct Evenly {
  A ahead;
  int64_t tiles, due;
  void beside() {
    for (due += 4; due >= tiles; due -= tiles)
      if (ahead.more()) ahead.step();
  }
};

// Tiles of rows against two blocks: sums in tiles 0 to 2 and 3 to 5. Three by two load the fewest lines from
// the second cache, where both operands are: five tiles for six products.
template <class T, int RowTiles>
struct Pair {
  const uint16_t *x, *w;
  int64_t row_step, chunk_step, block_step;  // numbers from a tile of rows, of a block, to the next
  float* sums[3];                            // of each tile of rows, and bytes from one row to the next
  int64_t bytes[3];

  void zero() const {
    T::template zero<0>(), T::template zero<3>();
    if constexpr (RowTiles > 1) T::template zero<1>(), T::template zero<4>();
    if constexpr (RowTiles > 2) T::template zero<2>(), T::template zero<5>();
  }
  template <int Tile>
  void load_tile() const {
    T::template load<Tile>(sums[Tile], bytes[Tile]);
    T::template load<Tile + 3>(sums[Tile] + kBlockRows, bytes[Tile]);
  }
  template <int Tile>
  void store_tile() const {
    T::template store<Tile>(sums[Tile], bytes[Tile]);
    T::template store<Tile + 3>(sums[Tile] + kBlockRows, bytes[Tile]);
  }
  void load() const {
    load_tile<0>();
    if constexpr (RowTiles > 1) load_tile<1>();
    if constexpr (RowTiles > 2) load_tile<2>();
  }
  void store() const {
    store_tile<0>();
    if constexpr (RowTiles > 1) store_tile<1>();
    if constexpr (RowTiles > 2) store_tile<2>();
  }

  // Steps of what is ahead stand between the products.
  template <class A>
  void multiply(int64_t chunks, A* ahead) const {
    const uint16_t *a = x, *b = w;
    // The lines of the sums are seldom in a cache: fetched with the first half of the chunks.
    const int64_t lines = (2 * kTileRows + chunks - 1) / chunks;
    int64_t line = 0;
    for (int64_t c = 0; c < chunks; c++, a += kTileBytes / 2, b += chunk_step) {
      for (int64_t end = line + lines; line < end && line < kTileRows; line++)
        for (int i = 0; i < RowTiles; i++) {
          T::own(sums[i] + line * (bytes[i] / 4));
          T::own(sums[i] + line * (bytes[i] / 4) + kBlockRows);
        }
      T::template load<7>(b, 64);
      T::template load<6>(a, 64);
      T::template dot_bf16<0, 6, 7>();
      ahead->beside();
      if constexpr (RowTiles == 3) {
        T::template load<6>(a + row_step, 64);
        T::template dot_bf16<1, 6, 7>();
        ahead->beside();
        T::template load<6>(a + 2 * row_step, 64);
        T::template dot_bf16<2, 6, 7>();
        ahead->beside();
        T::template load<7>(b + block_step, 64);
        T::template dot_bf16<5, 6, 7>();
        ahead->beside();
        T::template load<6>(a + row_step, 64);
        T::template dot_bf16<4, 6, 7>();
        ahead->beside();
        T::template load<6>(a, 64);
        T::template dot_bf16<3, 6, 7>();
      } else {  // tiles 2 and 5 are free
        if constexpr (RowTiles == 2) {
          T::template load<2>(a + row_step, 64);
          T::template dot_bf16<1, 2, 7>();
          ahead->beside();
        }
        T::template load<5>(b + block_step, 64);
        T::template dot_bf16<3, 6, 5>();
        if constexpr (RowTiles == 2) {
          ahead->beside();
          T::template dot_bf16<4, 2, 5>();
        }
      }
      ahead->beside();
    }
  }
};

// More rows than two tiles have, an even number of blocks, at least 2. Rows of the last tile that do not
// exist are multiplied too, and left out of y.
template <class T, int Format>
void multiply_many(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y,
                   int64_t ldy, uint8_t* scratch) {
  const int64_t chunks = layout->k_pad / 32, tiles = (x->rows + kTileRows - 1) / kTileRows;
  const int64_t parts = (chunks + kDeep - 1) / kDeep, pairs = blocks / 2, stages = pairs * parts;
  const int64_t groups = (tiles + 2) / 3, rest = x->rows % kTileRows;
  float* rest_sums = reinterpret_cast<float*>(scratch + kRestAt);
  auto first_of = [&](int64_t stage) { return chunks * (stage / pairs) / parts; };
  auto count_of = [&](int64_t stage) { return chunks * (stage / pairs + 1) / parts - first_of(stage); };
  auto weights = [&](int64_t stage) { return w + stage % pairs * 2 * layout->block_bytes; };
  auto slot = [&](int64_t stage) { return reinterpret_cast<uint16_t*>(scratch + stage % 2 * kStageBytes); };
  auto ahead_of = [&](int64_t stage) {
    const int64_t first = first_of(stage), last = stage < stages ? first + count_of(stage) : first;
    return Ahead<T, Format>(weights(stage), layout, first, last, slot(stage));
  };
  T::configure_full();
  if (Format != kBf16)
    for (auto begin = ahead_of(0); begin.more();) begin.step();
  for (int64_t stage = 0; stage < stages; stage++) {
    const int64_t first = first_of(stage), count = count_of(stage);
    Evenly<Ahead<T, Format>> ahead = {ahead_of(stage + 1), tiles, 0};
    auto run = [&](auto pair, int64_t tile, int64_t ways) {
      pair.x = x->tiles + tile * kTileRows * layout->k_pad + first * (kTileBytes / 2);
      pair.row_step = kTileRows * layout->k_pad;
      if (Format == kBf16) {
        pair.w = reinterpret_cast<const uint16_t*>(weights(stage) + first * kTileBytes);
        pair.chunk_step = kTileBytes / 2, pair.block_step = layout->block_bytes / 2;
      } else {
        pair.w = slot(stage);
        pair.chunk_step = kTileBytes, pair.block_step = kTileBytes / 2;
      }
      float* to = y + tile * kTileRows * ldy + stage % pairs * 2 * kBlockRows;
      for (int64_t i = 0; i < ways; i++) {
        pair.sums[i] = to + i * kTileRows * ldy;
        pair.bytes[i] = ldy * static_cast<int64_t>(sizeof(float));
      }
      const bool short_of_rows = rest != 0 && tile + ways == tiles;
      if (short_of_rows) {
        pair.sums[ways - 1] = rest_sums;
        pair.bytes[ways - 1] = 2 * kBlockRows * sizeof(float);
      }
      constexpr int64_t kWidth = 2 * kBlockRows;
      float* last = to + (ways - 1) * kTileRows * ldy;
      if (first == 0) {
        pair.zero();
      } else {
        for (int64_t m = 0; short_of_rows && m < rest; m++)
          memcpy(rest_sums + m * kWidth, last + m * ldy, kWidth * 4);
        pair.load();
      }
      pair.multiply(count, &ahead);
      pair.store();
      for (int64_t m = 0; short_of_rows && m < rest; m++)
        memcpy(last + m * ldy, rest_sums + m * kWidth, kWidth * 4);
    };
    for (int64_t g = 0; g < groups; g++) {
      const int64_t tile = tiles * g / groups, ways = tiles * (g + 1) / groups - tile;
      if (ways == 3)
        run(Pair<T, 3>(), tile, ways);
      else if (ways == 2)
        run(Pair<T, 2>(), tile, ways);
      else
        run(Pair<T, 1>(), tile, ways);
    }
    while (ahead.ahead.more()) ahead.ahead.step();  // where the next stage has more chunks
  }
}

template <class T, int Format>
void tile_bulk(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
               void* scratch) {
  const int64_t chunks = layout->k_pad / 32, rows = x->rows;
  int64_t b = 0;
  if (rows > 2 * kTileRows && blocks > 1) {
    b = blocks / 2 * 2;
    multiply_many<T, Format>(w, b, layout, x, y, ldy, static_cast<uint8_t*>(scratch));
  }
  const bool once = rows <= 2 * kTileRows, wide = once && rows > kTileRows;
  const int64_t panel = once ? chunks : kPanel, slots = once ? kSlots : kPanel;
  const int64_t row_step = wide ? 2 * kTileRows : kTileRows, block_step = wide ? 1 : 2;
  int64_t first_now = -1, second_now = -1;
  for (; b < blocks; b += block_step)
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
