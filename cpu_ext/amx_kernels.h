// The AMX kernels over a policy T of tiles and vectors: the hardware's in isa_amx.cpp, arrays in
// isa_amx_twin.cpp, so that this logic runs under test on every machine.
//
// T::configure(rows, k_bytes): tiles 0 and 1 hold 16 rows of results, 2 and 3 hold `rows` rows of them; tiles
// 4
//   and 5 are activations of 16 rows, 6 of `rows` rows (k_bytes wide each), 7 is weights (k_bytes / 4 rows).
// T::zero<t>() T::load<t>(p, stride) T::store<t>(p, stride) T::release()
// T::dot_ss / dot_su<result, a, b>(): int8 x int8, int8 x uint8; amx_bf16.h has the rest of T
// T::V is the vector policy (see exact.h) that flushes results; 16 lanes.
#pragma once

#include "amx_bf16.h"
#include "exact.h"
#include "kernels.h"

namespace hetero {
namespace {

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

// The formats that only keep values, in the order of enum Format. Their exact kernels are those of VNNI: few
// rows of a step come to them.
#define HETERO_BULK_ROW(name, isa, T, Format)                                                             \
  {                                                                                                       \
    {nullptr, nullptr}, {nullptr, nullptr}, { tile_bulk<T, Format>, name "." isa "_bf16.bulk", kInTiles } \
  }
#define HETERO_KEPT_BULK(isa, T)                                                              \
  HETERO_BULK_ROW("int8a", isa, T, kInt8a), HETERO_BULK_ROW("int4z", isa, T, kInt4z),         \
      HETERO_BULK_ROW("int8z", isa, T, kInt8z), HETERO_BULK_ROW("iq4_nl", isa, T, kIq4Nl),    \
      HETERO_BULK_ROW("q4_k", isa, T, kQ4K), HETERO_BULK_ROW("q5_k", isa, T, kQ5K),           \
      HETERO_BULK_ROW("q2_k", isa, T, kQ2K), HETERO_BULK_ROW("q3_k", isa, T, kQ3K),           \
      HETERO_BULK_ROW("q6_k", isa, T, kQ6K), HETERO_BULK_ROW("iq4_xs", isa, T, kIq4Xs),       \
      HETERO_BULK_ROW("iq3_xxs", isa, T, kIq4Xs), HETERO_BULK_ROW("iq3_s", isa, T, kIq4Xs),   \
      HETERO_BULK_ROW("iq2_xxs", isa, T, kIq2Xxs), HETERO_BULK_ROW("iq2_xs", isa, T, kIq2Xs), \
      HETERO_BULK_ROW("iq2_s", isa, T, kIq2Xs), HETERO_BULK_ROW("iq1_s", isa, T, kIq2Xxs),    \
      HETERO_BULK_ROW("iq1_m", isa, T, kIq2Xs), HETERO_BULK_ROW("fp8_row", isa, T, kFp8Row)

#define HETERO_AMX_UNIT(isa, T)                                                                          \
  {isa,                                                                                                  \
   {{{nullptr, nullptr}, {nullptr, nullptr}, {nullptr, nullptr}},                                        \
    {{nullptr, nullptr}, {nullptr, nullptr}, {tile_bulk<T, kBf16>, "bf16." isa "_bf16.bulk", kInTiles}}, \
    {{nullptr, nullptr},                                                                                 \
     {tile_quant<T, kInt8>, "int8." isa "_int8.gemm"},                                                   \
     {tile_bulk<T, kInt8>, "int8." isa "_bf16.bulk", kInTiles}},                                         \
    {{nullptr, nullptr},                                                                                 \
     {tile_quant<T, kInt4>, "int4." isa "_int8.gemm"},                                                   \
     {tile_bulk<T, kInt4>, "int4." isa "_bf16.bulk", kInTiles}},                                         \
    {{nullptr, nullptr},                                                                                 \
     {tile_quant<T, kInt4a>, "int4a." isa "_int8.gemm"},                                                 \
     {tile_bulk<T, kInt4a>, "int4a." isa "_bf16.bulk", kInTiles}},                                       \
    {{nullptr, nullptr}, {nullptr, nullptr}, {tile_bulk<T, kFp8>, "fp8." isa "_bf16.bulk", kInTiles}},   \
    {{nullptr, nullptr},                                                                                 \
     {tile_quant<T, kMxfp4>, "mxfp4." isa "_int8.gemm"},                                                 \
     {tile_bulk<T, kMxfp4>, "mxfp4." isa "_bf16.bulk", kInTiles}},                                       \
    {{nullptr, nullptr},                                                                                 \
     {tile_quant<T, kNvfp4>, "nvfp4." isa "_int8.gemm"},                                                 \
     {tile_bulk<T, kNvfp4>, "nvfp4." isa "_bf16.bulk", kInTiles}},                                       \
    HETERO_KEPT_BULK(isa, T)},                                                                           \
   nullptr,                                                                                              \
   nullptr,                                                                                              \
   nullptr}

}  // namespace
}  // namespace hetero
