// The exact kernels of every instruction set, written once over a vector policy P. Everything stands in an
// anonymous namespace: each unit gets its own copy, compiled for its own instruction set.
//
// P has kLanes (16, or 8: then a block is done in two halves) and
//   F, I, W              kLanes floats, kLanes int32, the decoded codes of 32 k for kLanes rows
//   zero load store set1 add mul fma to_float
//   scale<Format>(p)     scales of kLanes rows -> F: fp16; E8M0 less one; E4M3 * 2^-8; integers
//   bytes(p)             kLanes unsigned bytes -> F
//   bf_even(p) bf_odd(p) first / second bf16 of each 4-byte lane -> F
//   lookup(table)        a table as decode takes it (Lookup)
//   decode<Format>(p, t) 4 or 8 steps of 64 bytes from p, kLanes lanes of each -> W
//   dot<Format, First, Count>(w, a, sum)  dot of the group's activations at a with each lane, in steps of 4 k
//                        from First on, zero point subtracted; `sum` is the sum of these activations
//   half_sums(a, sums)   sums of the first and the second 16 of 32 activations
//   half(p)              kLanes fp16 -> F
//   e4m3(p, w)           a step of fp8 -> w[0..4), numbers * 2^-8: the first two k of the first half of the
//                        rows, of the second half (k within row), then the same of the last two k
//   pair(p)              two floats, over and over -> F
//   fold(first, second)  sums of neighbours: those of first, then those of second
//   kGemvBlocks          blocks that the GEMV of the quantised formats streams at a time, where their sums
//   kMaxSums             (one per block half and row) fit so many registers
//   kFloatRows, kFloatUnits  the same for f32 and bf16, and how many columns of kLanes rows
//   prefetch(p) prefetch_far(p)  into the first and the second cache
#pragma once

#include <string.h>

#include "codes.h"
#include "kernels.h"

namespace hetero {
namespace {

// Bytes that weights are fetched ahead: the float kernels and the tiles into the first cache at once, the
// quantised kernels into the second cache first (docs/perf.md has the measurements).
constexpr int64_t kAhead = 2048, kNear = 1024, kFar = 3072;

inline float float_at(const uint8_t* p) {
  float value;
  memcpy(&value, p, 4);
  return value;
}

// Adds the dot of a group to the sum of a row: see GemmFn. `minimum` is what stands beside the scale, if any.
template <class P, int Format>
inline typename P::F add_group(typename P::F acc, typename P::I dot, typename P::F scale,
                               typename P::F minimum, typename P::F a, int32_t sum) {
  using C = Codes<Format>;
  typename P::F number = P::to_float(dot);
  // Integers below 2^24: exact.
  if (C::kZeros) number = P::fma(minimum, P::set1(-static_cast<float>(sum)), number);
  acc = P::fma(number, P::mul(scale, a), acc);
  if (C::kMinimum) acc = P::fma(P::set1(static_cast<float>(sum)), P::mul(minimum, a), acc);
  return acc;
}

// M rows against U consecutive blocks, whose bytes arrive as U streams. Far fetches end at `stop`.
template <class P, int Format, int M, int U>
inline void quant_tile(const uint8_t* w, const uint8_t* stop, const Layout* layout, const Rows* x, int64_t m0,
                       float* y, int64_t ldy) {
  constexpr int kHalves = kBlockRows / P::kLanes;
  constexpr int kUnits = U * kHalves;
  using C = Codes<Format>;
  constexpr int kParts = C::kParts, kSteps = 8 / kParts;
  constexpr int64_t kBytes = C::kGroupBytes, kScales = kParts * C::kPartBytes;
  constexpr int64_t kSuperGroups = kSuperGroup / kActGroup;
  const int64_t groups = layout->k_pad / kActGroup;
  const int64_t inner = C::kFixed ? 1 : layout->group / kActGroup;
  const int8_t* q = x->q + m0 * layout->k_pad;
  const float* scale_a = x->scale + m0 * groups;
  const int32_t* sum = x->sum + m0 * groups * kParts;
  const uint8_t* scales = w + layout->scale_offset;
  const uint8_t* beside = w + layout->min_offset;
  const Table& table = table_of(C::kFixed ? layout->format : Format);
  const typename P::Lookup lookup = P::lookup(table);
  const typename P::F factor = P::set1(C::kTable ? table.factor : 1.0f);
  typename P::F acc[kUnits][M];
  for (int u = 0; u < kUnits; u++)
    for (int m = 0; m < M; m++) acc[u][m] = P::zero();
  typename P::F common[kUnits], common_min[kUnits];  // d and dmin; nvfp4: the scale of the matrix
  if (Format == kNvfp4)
    for (int u = 0; u < kUnits; u++)
      common[u] = P::set1(float_at(beside + u / kHalves * layout->block_bytes) * 128.0f);
  for (int64_t g = 0; g < groups; scales += kScales, beside += C::kBesideBytes) {
    if (C::kSuper && g % kSuperGroups == 0) {
      for (int u = 0; u < kUnits; u++) {
        const uint16_t* at = reinterpret_cast<const uint16_t*>(beside + u / kHalves * layout->block_bytes) +
                             u % kHalves * P::kLanes;
        common[u] = P::half(at);
        if (C::kTable) common[u] = P::mul(common[u], factor);
        if (C::kSuperMinima) common_min[u] = P::mul(P::half(at + kBlockRows), P::set1(-1.0f));
      }
      beside += C::kSuperBytes;
      for (int u = 0; u < U; u++) P::prefetch(beside + u * layout->block_bytes + 128);
    }
    typename P::F scale_w[kUnits][kParts], min_w[kUnits][kParts];  // zeros of int4z and int8z in min_w
    for (int u = 0; u < kUnits; u++) {
      const int64_t block = u / kHalves * layout->block_bytes, lane = u % kHalves * P::kLanes;
      for (int part = 0; part < kParts; part++) {
        const uint8_t* at = scales + block + part * C::kPartBytes;
        scale_w[u][part] = P::template scale<Format>(at + lane * C::kScaleBytes);
        if (C::kSuper || Format == kNvfp4) scale_w[u][part] = P::mul(scale_w[u][part], common[u]);
        if (C::kSuperMinima) min_w[u][part] = P::mul(P::bytes(at + kBlockRows + lane), common_min[u]);
      }
      if (C::kMinima) min_w[u][0] = P::half(reinterpret_cast<const uint16_t*>(beside + block) + lane);
      if (C::kZeros) min_w[u][0] = P::bytes(beside + block + lane);
    }
    for (int u = 0; u < U; u++) P::prefetch(scales + u * layout->block_bytes + 256);
    for (const int64_t end = g + inner; g < end; g++, w += kBytes)
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; u++) {
        const uint8_t* codes_at = w + u / kHalves * layout->block_bytes + u % kHalves * P::kLanes * 4;
        if (u % kHalves == 0) {
          for (int64_t line = 0; line < kBytes; line += 64) P::prefetch(codes_at + kNear + line);
          if (w < stop)
            for (int64_t line = 0; line < kBytes; line += 64) P::prefetch_far(codes_at + kFar + line);
        }
        const typename P::W codes = P::template decode<Format>(codes_at, lookup);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const typename P::F a = P::set1(scale_a[m * groups + g]);
          const int8_t* codes_a = q + m * layout->k_pad + g * kActGroup;
          const int32_t* sums = sum + (m * groups + g) * kParts;
          const typename P::I dot = P::template dot<Format, 0, kSteps>(codes, codes_a, sums[0]);
          acc[u][m] = add_group<P, Format>(acc[u][m], dot, scale_w[u][0], min_w[u][0], a, sums[0]);
          if constexpr (kParts == 2) {
            const typename P::I second = P::template dot<Format, kSteps, kSteps>(codes, codes_a, sums[1]);
            acc[u][m] = add_group<P, Format>(acc[u][m], second, scale_w[u][1], min_w[u][1], a, sums[1]);
          }
        }
      }
  }
  for (int u = 0; u < kUnits; u++)
    for (int m = 0; m < M; m++) P::store(y + (m0 + m) * ldy + u * P::kLanes, acc[u][m]);
}

// U blocks against `rows` rows, at most Max, from m0.
template <class P, int Format, int Max, int U>
inline void quant_rows(int64_t rows, const uint8_t* w, const uint8_t* stop, const Layout* layout,
                       const Rows* x, int64_t m0, float* y, int64_t ldy) {
  if constexpr (Max > 1) {
    if (rows < Max) return quant_rows<P, Format, Max - 1, U>(rows, w, stop, layout, x, m0, y, ldy);
  }
  if constexpr (Max * U * kBlockRows / P::kLanes <= P::kMaxSums) {
    quant_tile<P, Format, Max, U>(w, stop, layout, x, m0, y, ldy);
  } else {
    for (int u = 0; u < U; u++)
      quant_tile<P, Format, Max, 1>(w + u * layout->block_bytes, stop, layout, x, m0, y + u * kBlockRows,
                                    ldy);
  }
}

// GEMV kernels (MaxRows up to 4) stream kGemvBlocks blocks at a time.
template <class P, int Format, int MaxRows>
void quant_blocks(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y,
                  int64_t ldy) {
  constexpr int kWide = MaxRows <= 4 ? P::kGemvBlocks : 1;
  const int64_t bytes = blocks * layout->block_bytes, far = kFar + (kWide - 1) * layout->block_bytes;
  const uint8_t* stop = w + (bytes > far ? bytes - far : 0);  // no far fetch beyond the last block
  int64_t b = 0;
  for (; b + kWide <= blocks; b += kWide)
    for (int64_t m = 0; m < x->rows; m += MaxRows)
      quant_rows<P, Format, MaxRows, kWide>(x->rows - m < MaxRows ? x->rows - m : MaxRows,
                                            w + b * layout->block_bytes, stop, layout, x, m,
                                            y + b * kBlockRows, ldy);
  if constexpr (kWide > 1) {
    for (; b < blocks; b++)
      for (int64_t m = 0; m < x->rows; m += MaxRows)
        quant_rows<P, Format, MaxRows, 1>(x->rows - m < MaxRows ? x->rows - m : MaxRows,
                                          w + b * layout->block_bytes, stop, layout, x, m, y + b * kBlockRows,
                                          ldy);
  }
}

// Calls run(rows, m) with the rows from m on, as many as `bytes` at `scratch` hold the sums of, until all
// have had their turn: `sum` of these is of halves of 16 k. A zero point or minimum of a half needs them.
template <class P, class Run>
inline void with_half_sums(const Layout* layout, const Rows* x, void* scratch, int64_t bytes, Run run) {
  const int64_t groups = layout->k_pad / kActGroup;
  const int64_t fit = bytes / (8 * groups);  // make_layout leaves room for one row
  int32_t* sums = static_cast<int32_t*>(scratch);
  for (int64_t m = 0; m < x->rows; m += fit) {
    Rows part = *x;
    part.q = x->q + m * layout->k_pad;
    part.scale = x->scale + m * groups;
    part.sum = sums;
    part.rows = x->rows - m < fit ? x->rows - m : fit;
    for (int64_t i = 0; i < part.rows * groups; i++) P::half_sums(part.q + i * kActGroup, sums + 2 * i);
    run(&part, m);
  }
}

template <class P, int Format, int MaxRows>
void quant_kernel(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y,
                  int64_t ldy, void* scratch) {
  if constexpr (Codes<Format>::kParts == 1) {
    quant_blocks<P, Format, MaxRows>(w, blocks, layout, x, y, ldy);
  } else {
    with_half_sums<P>(layout, x, scratch, kScratchBytes, [&](const Rows* part, int64_t m) {
      quant_blocks<P, Format, MaxRows>(w, blocks, layout, part, y + m * ldy, ldy);
    });
  }
}

// A row of a kernel table, and those of the formats that only keep the values of checkpoints, in the order of
// enum Format: a unit has templates `gemv` and `gemm`, and `fp8_gemv` and `fp8_gemm`, of its kernels. The iq
// types that differ in their table alone share a kernel, which finds the table by the layout.
#define HETERO_QUANT_ROW(name, isa, Format) \
  {                                         \
      {gemv<Format>, name "." isa ".gemv"}, \
      {gemm<Format>, name "." isa ".gemm"}, \
      {gemm<Format>, name "." isa ".gemm"}, \
  }
#define HETERO_FP8_ROW(name, isa, Format)       \
  {                                             \
      {fp8_gemv<Format>, name "." isa ".gemv"}, \
      {fp8_gemm<Format>, name "." isa ".gemm"}, \
      {fp8_gemm<Format>, name "." isa ".gemm"}, \
  }
#define HETERO_KEPT_FORMATS(isa)                                                          \
  HETERO_QUANT_ROW("int8a", isa, kInt8a), HETERO_QUANT_ROW("int4z", isa, kInt4z),         \
      HETERO_QUANT_ROW("int8z", isa, kInt8z), HETERO_QUANT_ROW("iq4_nl", isa, kIq4Nl),    \
      HETERO_QUANT_ROW("q4_k", isa, kQ4K), HETERO_QUANT_ROW("q5_k", isa, kQ5K),           \
      HETERO_QUANT_ROW("q2_k", isa, kQ2K), HETERO_QUANT_ROW("q3_k", isa, kQ3K),           \
      HETERO_QUANT_ROW("q6_k", isa, kQ6K), HETERO_QUANT_ROW("iq4_xs", isa, kIq4Xs),       \
      HETERO_QUANT_ROW("iq3_xxs", isa, kIq4Xs), HETERO_QUANT_ROW("iq3_s", isa, kIq4Xs),   \
      HETERO_QUANT_ROW("iq2_xxs", isa, kIq2Xxs), HETERO_QUANT_ROW("iq2_xs", isa, kIq2Xs), \
      HETERO_QUANT_ROW("iq2_s", isa, kIq2Xs), HETERO_QUANT_ROW("iq1_s", isa, kIq2Xxs),    \
      HETERO_QUANT_ROW("iq1_m", isa, kIq2Xs)

// Units are columns of kLanes output rows; unit u of a block pair starts at block u * kLanes / 16.
template <class P, int Format, int M, int U>
inline void float_tile(const uint8_t* w, const Layout* layout, const Rows* x, int64_t m0, float* y,
                       int64_t ldy) {
  constexpr int kHalves = kBlockRows / P::kLanes;
  const float* a = x->f32 + m0 * layout->k_pad;
  typename P::F even[M][U], odd[M][U];
  for (int m = 0; m < M; m++)
    for (int u = 0; u < U; u++) even[m][u] = odd[m][u] = P::zero();
  for (int64_t k = 0; k < layout->k_pad; k += 2) {
    typename P::F w_even[U], w_odd[U];
    for (int u = 0; u < U; u++) {
      const uint8_t* p = w + (u / kHalves) * layout->block_bytes + (u % kHalves) * P::kLanes * 4;
      if (Format == kF32) {
        w_even[u] = P::load(reinterpret_cast<const float*>(p + k * 64));
        w_odd[u] = P::load(reinterpret_cast<const float*>(p + k * 64 + 64));
        P::prefetch(p + k * 64 + kAhead);
        P::prefetch(p + k * 64 + 64 + kAhead);
      } else {
        w_even[u] = P::bf_even(p + k * 32);
        w_odd[u] = P::bf_odd(p + k * 32);
        P::prefetch(p + k * 32 + kAhead);
      }
    }
    for (int m = 0; m < M; m++) {
      const typename P::F a_even = P::set1(a[m * layout->k_pad + k]);
      const typename P::F a_odd = P::set1(a[m * layout->k_pad + k + 1]);
      for (int u = 0; u < U; u++) {
        even[m][u] = P::fma(w_even[u], a_even, even[m][u]);
        odd[m][u] = P::fma(w_odd[u], a_odd, odd[m][u]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int u = 0; u < U; u++) P::store(y + (m0 + m) * ldy + u * P::kLanes, P::add(even[m][u], odd[m][u]));
}

template <class P, int Format, int Max, int U>
inline void float_rows(int64_t rows, const uint8_t* w, const Layout* layout, const Rows* x, int64_t m0,
                       float* y, int64_t ldy) {
  if constexpr (Max > 1) {
    if (rows < Max) return float_rows<P, Format, Max - 1, U>(rows, w, layout, x, m0, y, ldy);
  }
  float_tile<P, Format, Max, U>(w, layout, x, m0, y, ldy);
}

template <class P, int Format>
void float_kernel(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y,
                  int64_t ldy, void*) {
  constexpr int kHalves = kBlockRows / P::kLanes;
  constexpr int kWide = P::kFloatUnits > kHalves ? P::kFloatUnits / kHalves : 1;  // blocks at a time
  int64_t b = 0;
  for (; b + kWide <= blocks; b += kWide)
    for (int64_t m = 0; m < x->rows; m += P::kFloatRows) {
      const int64_t rows = x->rows - m < P::kFloatRows ? x->rows - m : P::kFloatRows;
      float_rows<P, Format, P::kFloatRows, kWide * kHalves>(rows, w + b * layout->block_bytes, layout, x, m,
                                                            y + b * kBlockRows, ldy);
    }
  for (; b < blocks; b++)
    for (int64_t m = 0; m < x->rows; m += P::kFloatRows) {
      const int64_t rows = x->rows - m < P::kFloatRows ? x->rows - m : P::kFloatRows;
      float_rows<P, Format, P::kFloatRows, kHalves>(rows, w + b * layout->block_bytes, layout, x, m,
                                                    y + b * kBlockRows, ldy);
    }
}

// M rows against U consecutive blocks of fp8 or fp8_row.
template <class P, int Format, int M, int U>
inline void fp8_tile(const uint8_t* w, const Layout* layout, const Rows* x, int64_t m0, float* y,
                     int64_t ldy) {
  constexpr int kHalves = kBlockRows / P::kLanes;
  constexpr int kUnits = U * kHalves;
  const float* a = x->f32 + m0 * layout->k_pad;
  const uint8_t* scales = w + layout->scale_offset;
  typename P::F acc[kUnits][M];
  for (int u = 0; u < kUnits; u++)
    for (int m = 0; m < M; m++) acc[u][m] = P::zero();
  typename P::F of_rows[kUnits];
  if (Format == kFp8Row)
    for (int u = 0; u < kUnits; u++) {
      const uint8_t* at = scales + u / kHalves * layout->block_bytes + u % kHalves * P::kLanes * 4;
      of_rows[u] = P::mul(P::load(reinterpret_cast<const float*>(at)), P::set1(256.0f));
    }
  for (int64_t k0 = 0; k0 < layout->k_pad; k0 += layout->group) {
    typename P::F part[kUnits][M][2];
    for (int u = 0; u < kUnits; u++)
      for (int m = 0; m < M; m++) part[u][m][0] = part[u][m][1] = P::zero();
    for (int64_t k = k0; k < k0 + layout->group; k += 4, w += 64)
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; u++) {
        const uint8_t* p = w + u / kHalves * layout->block_bytes + u % kHalves * P::kLanes * 4;
        if (u % kHalves == 0) P::prefetch(p + kAhead);
        typename P::F code[4];
        P::e4m3(p, code);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const typename P::F first = P::pair(a + m * layout->k_pad + k);
          const typename P::F second = P::pair(a + m * layout->k_pad + k + 2);
          part[u][m][0] = P::fma(code[0], first, part[u][m][0]);
          part[u][m][1] = P::fma(code[1], first, part[u][m][1]);
          part[u][m][0] = P::fma(code[2], second, part[u][m][0]);
          part[u][m][1] = P::fma(code[3], second, part[u][m][1]);
        }
      }
    for (int u = 0; u < kUnits; u++) {
      typename P::F scale;
      if (Format == kFp8Row)
        scale = of_rows[u];
      else
        scale = P::set1(float_at(scales + u / kHalves * layout->block_bytes) * 256.0f);
      for (int m = 0; m < M; m++) acc[u][m] = P::fma(P::fold(part[u][m][0], part[u][m][1]), scale, acc[u][m]);
    }
    if (Format == kFp8) scales += 4;
  }
  for (int u = 0; u < kUnits; u++)
    for (int m = 0; m < M; m++) P::store(y + (m0 + m) * ldy + u * P::kLanes, acc[u][m]);
}

template <class P, int Format, int Max, int U>
inline void fp8_rows(int64_t rows, const uint8_t* w, const Layout* layout, const Rows* x, int64_t m0,
                     float* y, int64_t ldy) {
  if constexpr (Max > 1) {
    if (rows < Max) return fp8_rows<P, Format, Max - 1, U>(rows, w, layout, x, m0, y, ldy);
  }
  fp8_tile<P, Format, Max, U>(w, layout, x, m0, y, ldy);
}

// MaxRows rows of U blocks at a time.
template <class P, int Format, int MaxRows, int U>
void fp8_kernel(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
                void*) {
  int64_t b = 0;
  for (; b + U <= blocks; b += U)
    for (int64_t m = 0; m < x->rows; m += MaxRows)
      fp8_rows<P, Format, MaxRows, U>(x->rows - m < MaxRows ? x->rows - m : MaxRows,
                                      w + b * layout->block_bytes, layout, x, m, y + b * kBlockRows, ldy);
  if constexpr (U > 1) {
    for (; b < blocks; b++)
      for (int64_t m = 0; m < x->rows; m += MaxRows)
        fp8_rows<P, Format, MaxRows, 1>(x->rows - m < MaxRows ? x->rows - m : MaxRows,
                                        w + b * layout->block_bytes, layout, x, m, y + b * kBlockRows, ldy);
  }
}

}  // namespace
}  // namespace hetero
