// The bulk class of bf16 by vdpbf16ps, sums in float32.
#include "avx512_policy.h"
#include "exact.h"
#include "tables.h"

namespace hetero {
namespace {

using P = Avx512;

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
          void*) {
  int64_t b = 0;
  for (; b + 2 <= blocks; b += 2)
    block_rows<2>(x->rows, w + b * layout->block_bytes, layout, x->bf16, y + b * kBlockRows, ldy);
  if (b < blocks)
    block_rows<1>(x->rows, w + b * layout->block_bytes, layout, x->bf16, y + b * kBlockRows, ldy);
}

const Kernel kNone = {nullptr, nullptr};
const IsaTable kUnit = {
    "avx512_bf16",
    {{kNone, kNone, kNone},
     {kNone, kNone, {bulk, "bf16.avx512_bf16.bulk", kInBf16}},
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
