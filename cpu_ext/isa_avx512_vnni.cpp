// The quantised formats by vpdpbusd: unsigned codes times signed activations.
#include "avx512_policy.h"
#include "exact.h"
#include "tables.h"

namespace hetero {
namespace {

struct Vnni : Avx512 {
  template <int Format, int First, int Count>
  static I dot(const W& w, const int8_t* a, int32_t sum) {
    constexpr int32_t kZero = Codes<Format>::kZero;
    I total = kZero ? _mm512_set1_epi32(-kZero * sum) : _mm512_setzero_si512();
    for (int i = First; i < First + Count; i++) total = _mm512_dpbusd_epi32(total, w.v[i], four(a + 4 * i));
    return total;
  }
};

using P = Vnni;

constexpr int64_t kFewRows = 11;               // up to here the kernel of exact.h is as fast
constexpr int kTileRows = 4, kTileBlocks = 2;  // 8 dots and 8 sums stay in registers; 12 do not
constexpr int64_t kSection = 16;               // groups of 32 k whose weights are decoded together

// Weights of a section as the tiles read them; int8 is read where it lies.
struct Section {
  alignas(64) uint8_t codes[kTileBlocks][kSection][512];
  alignas(64) float scale[kTileBlocks][kSection][kBlockRows];
  alignas(64) float minimum[kTileBlocks][kSection][kBlockRows];
};
static_assert(sizeof(Section) <= kScratchBytes, "scratch of a section");

// What the tiles of a section share.
struct Part {
  const uint8_t* codes[kTileBlocks];  // of the section's first group
  int64_t first, groups;              // of k
  int64_t act_groups, k_pad;
  bool begins;  // the sums start from zero
};

// Fetches the codes of a group ahead. Behind the codes of a block those of the next ones are at work already.
template <int Format, int U>
inline void fetch_group(const uint8_t* block, const Layout* layout, int64_t g) {
  constexpr int64_t kBytes = Codes<Format>::kGroupBytes;
  int64_t at = g * kBytes + kFar;
  if (at >= layout->scale_offset) at += (U - 1) * layout->block_bytes;
  for (int64_t line = 0; line < kBytes; line += 64) P::prefetch(block + at + line);
}

// M rows against U blocks over one section; every dot and every sum in a register of its own.
template <int Format, int M, int U>
inline void section_tile(const Part& part, const Section& weights, const Rows* x, int64_t m0, float* y,
                         int64_t ldy) {
  constexpr int32_t kZero = Codes<Format>::kZero;
  const int8_t* q = x->q + m0 * part.k_pad + part.first * kActGroup;
  const float* scale_a = x->scale + m0 * part.act_groups + part.first;
  const int32_t* sum = x->sum + m0 * part.act_groups + part.first;
  P::F acc[U][M];
  for (int u = 0; u < U; u++)
    for (int m = 0; m < M; m++)
      acc[u][m] = part.begins ? P::zero() : P::load(y + (m0 + m) * ldy + u * kBlockRows);
  for (int64_t g = 0; g < part.groups; g++) {
    P::I dot[U][M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const P::I start = kZero ? P::set1i(-kZero * sum[m * part.act_groups + g]) : _mm512_setzero_si512();
      for (int u = 0; u < U; u++) dot[u][m] = start;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      P::I w[U];
      for (int u = 0; u < U; u++) w[u] = _mm512_loadu_si512(part.codes[u] + g * 512 + 64 * i);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const P::I a = P::four(q + m * part.k_pad + g * kActGroup + 4 * i);
        for (int u = 0; u < U; u++) dot[u][m] = _mm512_dpbusd_epi32(dot[u][m], w[u], a);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const P::F a = P::set1(scale_a[m * part.act_groups + g]);
      for (int u = 0; u < U; u++) {
        acc[u][m] = P::fma(P::to_float(dot[u][m]), P::mul(P::load(weights.scale[u][g]), a), acc[u][m]);
        if (Format == kInt4a) {
          const P::F total = P::set1(static_cast<float>(sum[m * part.act_groups + g]));
          acc[u][m] = P::fma(total, P::mul(P::load(weights.minimum[u][g]), a), acc[u][m]);
        }
      }
    }
  }
  for (int u = 0; u < U; u++)
    for (int m = 0; m < M; m++) P::store(y + (m0 + m) * ldy + u * kBlockRows, acc[u][m]);
}

template <int Format, int Max, int U>
inline void section_rows(int64_t rows, const Part& part, const Section& weights, const Rows* x, int64_t m0,
                         float* y, int64_t ldy) {
  if constexpr (Max > 1) {
    if (rows < Max) return section_rows<Format, Max - 1, U>(rows, part, weights, x, m0, y, ldy);
  }
  section_tile<Format, Max, U>(part, weights, x, m0, y, ldy);
}

template <int Format, int U>
void section_blocks(const uint8_t* w, const Layout* layout, const Rows* x, float* y, int64_t ldy,
                    Section* weights) {
  const int64_t groups = layout->k_pad / kActGroup;
  const int64_t per_scale = Codes<Format>::kScaleBytes == 1 ? 1 : layout->group / kActGroup;
  const int64_t tiles = (x->rows + kTileRows - 1) / kTileRows;
  for (int64_t first = 0; first < groups; first += kSection) {
    Part part = {{},     first,         groups - first < kSection ? groups - first : kSection,
                 groups, layout->k_pad, first == 0};
    for (int u = 0; u < U; u++) {
      const uint8_t* block = w + u * layout->block_bytes;
      part.codes[u] = Format == kInt8 ? block + first * 512 : weights->codes[u][0];
      for (int64_t g = 0; g < part.groups; g++) {
        const int64_t at = (first + g) / per_scale * kBlockRows;
        fetch_group<Format, U>(block, layout, first + g);
        P::store(weights->scale[u][g],
                 P::scale<Format>(block + layout->scale_offset + at * Codes<Format>::kScaleBytes));
        if (Format == kInt4a)
          P::store(weights->minimum[u][g],
                   P::half(reinterpret_cast<const uint16_t*>(block + layout->min_offset) + at));
        if (Format == kInt8) continue;
        const P::W codes = P::decode<Format>(block + (first + g) * Codes<Format>::kGroupBytes);
        for (int i = 0; i < 8; i++) _mm512_store_si512(weights->codes[u][g] + 64 * i, codes.v[i]);
      }
    }
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t m0 = x->rows * t / tiles, m1 = x->rows * (t + 1) / tiles;
      section_rows<Format, kTileRows, U>(m1 - m0, part, *weights, x, m0, y, ldy);
    }
  }
}

// The exact product for many rows. A load of activations serves two blocks, one of weights four rows, and
// eight dots run beside each other instead of one after the other; weights are decoded once for all rows.
template <int Format>
void many_rows(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
               void* scratch) {
  if (x->rows <= kFewRows) return quant_kernel<P, Format, 8>(w, blocks, layout, x, y, ldy, scratch);
  Section* weights = static_cast<Section*>(scratch);
  int64_t b = 0;
  for (; b + kTileBlocks <= blocks; b += kTileBlocks)
    section_blocks<Format, kTileBlocks>(w + b * layout->block_bytes, layout, x, y + b * kBlockRows, ldy,
                                        weights);
  if (b < blocks)
    section_blocks<Format, 1>(w + b * layout->block_bytes, layout, x, y + b * kBlockRows, ldy, weights);
}

const Kernel kNone = {nullptr, nullptr};
const IsaTable kUnit = {
    "avx512_vnni",
    {{kNone, kNone, kNone},
     {kNone, kNone, kNone},
     {{quant_kernel<P, kInt8, 4>, "int8.avx512_vnni.gemv"},
      {many_rows<kInt8>, "int8.avx512_vnni.gemm"},
      {many_rows<kInt8>, "int8.avx512_vnni.gemm"}},
     {{quant_kernel<P, kInt4, 4>, "int4.avx512_vnni.gemv"},
      {many_rows<kInt4>, "int4.avx512_vnni.gemm"},
      {many_rows<kInt4>, "int4.avx512_vnni.gemm"}},
     {{quant_kernel<P, kInt4a, 4>, "int4a.avx512_vnni.gemv"},
      {many_rows<kInt4a>, "int4a.avx512_vnni.gemm"},
      {many_rows<kInt4a>, "int4a.avx512_vnni.gemm"}},
     {kNone, kNone, kNone},
     {{quant_kernel<P, kMxfp4, 4>, "mxfp4.avx512_vnni.gemv"},
      {many_rows<kMxfp4>, "mxfp4.avx512_vnni.gemm"},
      {many_rows<kMxfp4>, "mxfp4.avx512_vnni.gemm"}},
     {{quant_kernel<P, kNvfp4, 4>, "nvfp4.avx512_vnni.gemv"},
      {quant_kernel<P, kNvfp4, 8>, "nvfp4.avx512_vnni.gemm"},
      {quant_kernel<P, kNvfp4, 8>, "nvfp4.avx512_vnni.gemm"}}},
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

const IsaTable* avx512_vnni_unit() { return &kUnit; }

}  // namespace hetero
