// The bulk class of bf16 by vdpbf16ps: activations rounded to bf16, sums in float32.
#include "avx512_policy.h"
#include "exact.h"
#include "tables.h"

namespace hetero {
namespace {

using P = Avx512;

void round_rows(const Rows* x, int64_t m0, int64_t rows, int64_t k_pad, uint16_t* out) {
  for (int64_t i = 0; i < rows * k_pad; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x->f32 + m0 * k_pad + i)));
}

inline __m512bh pair(const uint16_t* p) {
  int32_t both;
  memcpy(&both, p, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

template <int M, int Blocks>
inline void tile(const uint8_t* w, const Layout* layout, const uint16_t* a, float* y, int64_t ldy) {
  __m512 acc[M][Blocks];
  for (int m = 0; m < M; m++)
    for (int b = 0; b < Blocks; b++) acc[m][b] = P::zero();
  for (int64_t k = 0; k < layout->k_pad; k += 2) {
    __m512bh codes[Blocks];
    for (int b = 0; b < Blocks; b++) {
      const uint8_t* p = w + b * layout->block_bytes + k * 32;
      codes[b] = (__m512bh)_mm512_loadu_si512(p);
      P::prefetch(p + kAhead);
    }
    for (int m = 0; m < M; m++) {
      const __m512bh x = pair(a + m * layout->k_pad + k);
      for (int b = 0; b < Blocks; b++) acc[m][b] = _mm512_dpbf16_ps(acc[m][b], codes[b], x);
    }
  }
  for (int m = 0; m < M; m++)
    for (int b = 0; b < Blocks; b++) P::store(y + m * ldy + b * kBlockRows, acc[m][b]);
}

template <int Max, int Blocks>
inline void tiles(int64_t rows, const uint8_t* w, const Layout* layout, const uint16_t* a, float* y,
                  int64_t ldy) {
  if constexpr (Max > 1) {
    if (rows < Max) return tiles<Max - 1, Blocks>(rows, w, layout, a, y, ldy);
  }
  tile<Max, Blocks>(w, layout, a, y, ldy);
}

constexpr int64_t kTileRows = 8;

template <int Blocks>
inline void block_rows(int64_t rows, const uint8_t* w, const Layout* layout, const uint16_t* a, float* y,
                       int64_t ldy) {
  for (int64_t m = 0; m < rows; m += kTileRows)
    tiles<kTileRows, Blocks>(rows - m < kTileRows ? rows - m : kTileRows, w, layout, a + m * layout->k_pad,
                             y + m * ldy, ldy);
}

void bulk(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
          void* scratch) {
  const int64_t fit = kScratchBytes / (2 * layout->k_pad) / kTileRows * kTileRows;
  if (fit == 0) return float_kernel<P, kBf16>(w, blocks, layout, x, y, ldy, scratch);
  uint16_t* a = static_cast<uint16_t*>(scratch);
  for (int64_t m = 0; m < x->rows; m += fit) {
    const int64_t rows = x->rows - m < fit ? x->rows - m : fit;
    round_rows(x, m, rows, layout->k_pad, a);
    int64_t b = 0;
    for (; b + 2 <= blocks; b += 2)
      block_rows<2>(rows, w + b * layout->block_bytes, layout, a, y + m * ldy + b * kBlockRows, ldy);
    if (b < blocks)
      block_rows<1>(rows, w + b * layout->block_bytes, layout, a, y + m * ldy + b * kBlockRows, ldy);
  }
}

const Kernel kNone = {nullptr, nullptr};
const IsaTable kUnit = {
    "avx512_bf16",
    {{kNone, kNone, kNone},
     {kNone, kNone, {bulk, "bf16.avx512_bf16.bulk"}},
     {kNone, kNone, kNone},
     {kNone, kNone, kNone},
     {kNone, kNone, kNone},
     {kNone, kNone, kNone},
     {kNone, kNone, kNone},
     {kNone, kNone, kNone}},
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

const IsaTable* avx512_bf16_unit() { return &kUnit; }

}  // namespace hetero
