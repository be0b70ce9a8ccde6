// The AMX kernels over a policy T of tiles and vectors: the hardware's in isa_amx.cpp, arrays in
// isa_amx_twin.cpp, so that this logic runs under test on every machine.
//
// T::configure(rows, k_bytes): tiles 0 and 1 hold 16 rows of results, 2 and 3 hold `rows` rows of them; tiles
// 4
//   and 5 are activations of 16 rows, 6 of `rows` rows (k_bytes wide each), 7 is weights (k_bytes / 4 rows).
// T::configure_pair(first, second): tiles 0 and 1 hold `first` rows of results, 2 and 3 `second` rows; 4 and
// 5
//   are activations of as many rows, 6 and 7 weights; all 64 bytes wide. `second` may be 0.
// T::decode<Format>(block, layout, c, to): the 32 k from 32 * c of a block as a tile of bf16 weights, scales
//   and zero points applied. It may truncate where it multiplies by kCentre.
// T::zero<t>() T::load<t>(p, stride) T::store<t>(p, stride) T::release()
// T::dot_ss / dot_su / dot_bf16<result, a, b>(): int8 x int8, int8 x uint8, bf16 x bf16
// T::V is the vector policy (see exact.h) that flushes results; 16 lanes.
#pragma once

#include "exact.h"
#include "kernels.h"

namespace hetero {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int kBatch = 4;             // groups of 32 k whose results are flushed together
constexpr int64_t kChunkRows = 128;   // rows whose sums are kept in the scratch
constexpr int64_t kTileFloats = 256;  // a tile of results

struct QuantScratch {
  alignas(64) uint8_t codes[kBatch][512];
  alignas(64) int32_t dots[2][kBatch][kTileFloats];
  alignas(64) float sums[kChunkRows * kBlockRows];
};
static_assert(sizeof(QuantScratch) <= kScratchBytes, "scratch of the quantised kernels");

// Codes of one group of 32 k as a weight tile: 8 rows of 4 k. Symmetric codes become signed values, so that
// the results need no correction by the zero point: cheaper than to subtract it from every result.
template <class T, int Format, int Result, int A>
inline void group_dot(const int8_t* a, int64_t stride, int32_t* dots) {
  T::template zero<Result>();
  T::template load<A>(a, stride);
  if (Format == kInt4a)
    T::template dot_su<Result, A, 7>();
  else
    T::template dot_ss<Result, A, 7>();
  T::template store<Result>(dots, 64);
}

// Turns the results of `groups` (at most kBatch) groups for `rows` rows into float and adds them to the sums.
template <class T, int Format>
struct Flush {
  using V = typename T::V;
  typename V::F scale[kBatch], minimum[kBatch];

  struct Rest {  // what a step leaves to do
    const int32_t (*dots)[kTileFloats];
    const float* scale_a;
    const int32_t* sum_a;
    float *sums, *out;  // kBlockRows floats a row; the sums start from zero if `first`
    int64_t out_ld, rows, groups;
    bool first;
  };

  template <int Groups>
  void rows_of(const Rest& r, int64_t stride) const {
    for (int64_t m = 0; m < r.rows; m++) {
      typename V::F acc = r.first ? V::zero() : V::load(r.sums + m * kBlockRows);
      for (int j = 0; j < Groups; j++) {
        const typename V::F a = V::set1(r.scale_a[m * stride + j / Codes<Format>::kParts]);
        const typename V::I dot = V::load_ints(r.dots[j] + m * kBlockRows);
        acc = V::fma(V::to_float(dot), V::mul(scale[j], a), acc);
        if (Format == kInt4a)
          acc = V::fma(V::set1(static_cast<float>(r.sum_a[m * stride + j])), V::mul(minimum[j], a), acc);
      }
      V::store(r.out + m * r.out_ld, acc);
    }
  }
  void run(const Rest& r, int64_t stride) const {
    switch (r.groups) {
      case 1:
        return rows_of<1>(r, stride);
      case 2:
        return rows_of<2>(r, stride);
      case 3:
        return rows_of<3>(r, stride);
      default:
        return rows_of<kBatch>(r, stride);
    }
  }
};

// One block against rows m0 .. m0 + rows, at most kChunkRows. The tiles of a step run while the results of
// the step before are flushed.
template <class T, int Format>
void quant_block(const uint8_t* w, const Layout* layout, const Rows* x, int64_t m0, int64_t rows, float* y,
                 int64_t ldy, QuantScratch* scratch) {
  using V = typename T::V;
  using C = Codes<Format>;
  constexpr int64_t kSize = kActGroup / C::kParts;  // k of a dot
  const int64_t k_pad = layout->k_pad, groups = k_pad / kSize, per_scale = layout->group / kSize;
  const int64_t act_groups = k_pad / kActGroup;
  const uint8_t* scales = w + layout->scale_offset;
  const uint16_t* minima = reinterpret_cast<const uint16_t*>(w + layout->min_offset);
  const typename V::F matrix = V::set1(Format == kNvfp4 ? float_at(w + layout->min_offset) * 128.0f : 1.0f);
  Flush<T, Format> flush[2];
  typename Flush<T, Format>::Rest rest = {};
  int side = 0, rest_side = 0, buffer = 0;
  for (int64_t g = 0; g < groups; g += kBatch, side ^= 1) {
    const int64_t batch = groups - g < kBatch ? groups - g : kBatch;
    const bool last = g + kBatch >= groups;
    for (int64_t j = 0; j < batch; j++) {
      flush[side].scale[j] =
          V::template scale<Format>(scales + (g + j) / per_scale * kBlockRows * C::kScaleBytes);
      if (Format == kNvfp4) flush[side].scale[j] = V::mul(flush[side].scale[j], matrix);
      if (Format == kInt4a) flush[side].minimum[j] = V::half(minima + (g + j) / per_scale * kBlockRows);
      if (j % C::kParts) continue;
      const uint8_t* at = w + (g + j) / C::kParts * C::kGroupBytes;
      for (int64_t line = 0; line < C::kGroupBytes; line += 64) V::prefetch(at + kAhead + line);
      T::template unpack<Format>(at, scratch->codes[j / C::kParts]);
    }
    for (int64_t m = 0; m < rows; m += kTileRows, buffer ^= 1) {
      const int64_t tile_rows = rows - m < kTileRows ? rows - m : kTileRows;
      int32_t (*dots)[kTileFloats] = scratch->dots[buffer];
      for (int64_t j = 0; j < batch; j++) {
        T::template load<7>(scratch->codes[0] + j * kSize * kBlockRows, 64);
        const int8_t* a = x->q + (m0 + m) * k_pad + (g + j) * kSize;
        if (tile_rows < kTileRows) {
          if (j % 2)
            group_dot<T, Format, 3, 6>(a, k_pad, dots[j]);
          else
            group_dot<T, Format, 2, 6>(a, k_pad, dots[j]);
        } else if (j % 2) {
          group_dot<T, Format, 1, 5>(a, k_pad, dots[j]);
        } else {
          group_dot<T, Format, 0, 4>(a, k_pad, dots[j]);
        }
      }
      if (rest.rows) flush[rest_side].run(rest, act_groups);
      const int64_t at = (m0 + m) * act_groups + g / C::kParts;
      float* sums = scratch->sums + m * kBlockRows;
      rest = {dots,
              x->scale + at,
              x->sum + at,
              sums,
              last ? y + (m0 + m) * ldy : sums,
              last ? ldy : kBlockRows,
              tile_rows,
              batch,
              g == 0};
      rest_side = side;
    }
  }
  flush[rest_side].run(rest, act_groups);
}

template <class T, int Format>
void tile_quant(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
                void* scratch) {
  const int64_t rest = x->rows % kTileRows;
  T::configure(rest ? rest : kTileRows, kActGroup / Codes<Format>::kParts);
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t m = 0; m < x->rows; m += kChunkRows)
      quant_block<T, Format>(w + b * layout->block_bytes, layout, x, m,
                             x->rows - m < kChunkRows ? x->rows - m : kChunkRows, y + b * kBlockRows, ldy,
                             static_cast<QuantScratch*>(scratch));
  T::release();
}

// Truncated to bf16, a value loses 2^-8 of its binade on average; multiplied by this before, it loses nothing
// on average and errs as much as one that is rounded (rms 0.0016 of the value).
constexpr float kCentre = 1.0f + 1.0f / 384;

constexpr int64_t kTileBytes = 1024;  // a tile of weights: 32 k x 16 rows
constexpr int64_t kRing = 4;          // chunks of 32 k that stay in the scratch where no other rows need them
constexpr int64_t kChunks = kScratchBytes / (2 * kTileBytes);

// Fetches the bytes of chunk c ahead. Behind the codes and scales of a block the next `blocks` - 1 are at
// work already, so the fetch goes on behind them.
template <class T, int Format>
inline void fetch_chunk(const uint8_t* block, const Layout* layout, int64_t c, int64_t blocks) {
  using V = typename T::V;
  int64_t bytes = kTileBytes;
  if constexpr (Format != kBf16) bytes = Codes<Format>::kGroupBytes;
  const int64_t skip = (blocks - 1) * layout->block_bytes;
  int64_t near = c * bytes + kNear, far = c * bytes + kFar;
  if (near >= layout->block_bytes) near += skip;
  if (far >= layout->block_bytes) far += skip;
  for (int64_t line = 0; line < bytes; line += 64) V::prefetch(block + near + line);
  for (int64_t line = 0; line < bytes; line += 64) V::prefetch_far(block + far + line);
  if (Format != kBf16 && c % 2 == 0)
    V::prefetch_far(block + layout->block_bytes + skip + layout->scale_offset + c * kBlockRows);
}

// One or two tiles of rows against one or two blocks over all k, by bf16 products summed in the tiles. The
// weights are decoded if `decode`, and then stay in the scratch if `keep`; otherwise they are there.
template <class T, int Format, bool TwoRows, bool TwoBlocks>
void pair_product(const uint8_t* w, const Layout* layout, const uint16_t* a, float* y, int64_t ldy,
                  uint8_t* scratch, bool decode, bool keep) {
  const int64_t k_pad = layout->k_pad, stride = 2 * k_pad;
  const uint8_t* next = w + layout->block_bytes;
  T::template zero<0>();
  if (TwoBlocks) T::template zero<1>();
  if (TwoRows) T::template zero<2>();
  if (TwoRows && TwoBlocks) T::template zero<3>();
  for (int64_t c = 0; c < k_pad / 32; c++) {
    const uint8_t *tile = w + c * kTileBytes, *tile_next = next + c * kTileBytes;
    if (decode) {
      fetch_chunk<T, Format>(w, layout, c, TwoBlocks ? 2 : 1);
      if (TwoBlocks) fetch_chunk<T, Format>(next, layout, c, 2);
    }
    if constexpr (Format != kBf16) {
      uint8_t* to = scratch + (keep ? c : c % kRing) * 2 * kTileBytes;
      if (decode) {
        T::template decode<Format>(w, layout, c, reinterpret_cast<uint16_t*>(to));
        if (TwoBlocks)
          T::template decode<Format>(next, layout, c, reinterpret_cast<uint16_t*>(to + kTileBytes));
      }
      tile = to;
      tile_next = to + kTileBytes;
    }
    T::template load<4>(a + c * 32, stride);
    T::template load<6>(tile, 64);
    T::template dot_bf16<0, 4, 6>();
    if (TwoBlocks) {
      T::template load<7>(tile_next, 64);
      T::template dot_bf16<1, 4, 7>();
    }
    if (TwoRows) {
      T::template load<5>(a + kTileRows * k_pad + c * 32, stride);
      T::template dot_bf16<2, 5, 6>();
      if (TwoBlocks) T::template dot_bf16<3, 5, 7>();
    }
  }
  const int64_t bytes = ldy * static_cast<int64_t>(sizeof(float));
  T::template store<0>(y, bytes);
  if (TwoBlocks) T::template store<1>(y + kBlockRows, bytes);
  if (TwoRows) T::template store<2>(y + kTileRows * ldy, bytes);
  if (TwoRows && TwoBlocks) T::template store<3>(y + kTileRows * ldy + kBlockRows, bytes);
}

template <class T, int Format>
void tile_bulk(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
               void* scratch) {
  const bool once = x->rows <= 2 * kTileRows, keep = !once && layout->k_pad / 32 <= kChunks;
  int64_t first_now = 0, second_now = 0;
  for (int64_t b = 0; b < blocks; b += 2)
    for (int64_t m = 0; m < x->rows; m += 2 * kTileRows) {
      const int64_t left = x->rows - m, first = left < kTileRows ? left : kTileRows;
      const int64_t second = left < 2 * kTileRows ? left - first : kTileRows;
      if (first != first_now || second != second_now) T::configure_pair(first, second);
      first_now = first, second_now = second;
      const auto product =
          second == 0
              ? (b + 1 < blocks ? pair_product<T, Format, false, true>
                                : pair_product<T, Format, false, false>)
              : (b + 1 < blocks ? pair_product<T, Format, true, true> : pair_product<T, Format, true, false>);
      product(w + b * layout->block_bytes, layout, x->bf16 + m * layout->k_pad, y + m * ldy + b * kBlockRows,
              ldy, static_cast<uint8_t*>(scratch), m == 0 || !keep, keep);
    }
  T::release();
}

#define HETERO_AMX_UNIT(isa, T)                                                                         \
  {isa,                                                                                                 \
   {{{nullptr, nullptr}, {nullptr, nullptr}, {nullptr, nullptr}},                                       \
    {{nullptr, nullptr}, {nullptr, nullptr}, {tile_bulk<T, kBf16>, "bf16." isa "_bf16.bulk", kInBf16}}, \
    {{nullptr, nullptr},                                                                                \
     {tile_quant<T, kInt8>, "int8." isa "_int8.gemm"},                                                  \
     {tile_bulk<T, kInt8>, "int8." isa "_bf16.bulk", kInBf16}},                                         \
    {{nullptr, nullptr},                                                                                \
     {tile_quant<T, kInt4>, "int4." isa "_int8.gemm"},                                                  \
     {tile_bulk<T, kInt4>, "int4." isa "_bf16.bulk", kInBf16}},                                         \
    {{nullptr, nullptr},                                                                                \
     {tile_quant<T, kInt4a>, "int4a." isa "_int8.gemm"},                                                \
     {tile_bulk<T, kInt4a>, "int4a." isa "_bf16.bulk", kInBf16}},                                       \
    {{nullptr, nullptr}, {nullptr, nullptr}, {nullptr, nullptr}},                                       \
    {{nullptr, nullptr},                                                                                \
     {tile_quant<T, kMxfp4>, "mxfp4." isa "_int8.gemm"},                                                \
     {tile_quant<T, kMxfp4>, "mxfp4." isa "_int8.gemm"}},                                               \
    {{nullptr, nullptr},                                                                                \
     {tile_quant<T, kNvfp4>, "nvfp4." isa "_int8.gemm"},                                                \
     {tile_quant<T, kNvfp4>, "nvfp4." isa "_int8.gemm"}}},                                              \
   nullptr,                                                                                             \
   nullptr,                                                                                             \
   nullptr}

}  // namespace
}  // namespace hetero
