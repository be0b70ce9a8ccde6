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

// Weights of a section as the tiles read them; codes of 8 bits are read where they lie.
struct Section {
  alignas(64) uint8_t codes[kTileBlocks][kSection][512];
  alignas(64) float scale[kTileBlocks][kSection][2][kBlockRows];
  alignas(64) float minimum[kTileBlocks][kSection][2][kBlockRows];
};
static_assert(sizeof(Section) <= kScratchBytes / 4, "scratch of a section");

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
  using C = Codes<Format>;
  constexpr int kParts = C::kParts, kSteps = 8 / kParts;
  constexpr int32_t kZero = C::kZero;
  const int8_t* q = x->q + m0 * part.k_pad + part.first * kActGroup;
  const float* scale_a = x->scale + m0 * part.act_groups + part.first;
  const int32_t* sum = x->sum + (m0 * part.act_groups + part.first) * kParts;
  P::F acc[U][M];
  for (int u = 0; u < U; u++)
    for (int m = 0; m < M; m++)
      acc[u][m] = part.begins ? P::zero() : P::load(y + (m0 + m) * ldy + u * kBlockRows);
  for (int64_t g = 0; g < part.groups; g++)
#pragma GCC unroll 2
    for (int half = 0; half < kParts; half++) {
      P::I dot[U][M];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const int32_t total = sum[(m * part.act_groups + g) * kParts + half];
        const P::I start = kZero ? P::set1i(-kZero * total) : _mm512_setzero_si512();
        for (int u = 0; u < U; u++) dot[u][m] = start;
      }
#pragma GCC unroll 8
      for (int i = half * kSteps; i < half * kSteps + kSteps; i++) {
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
        const int32_t total = sum[(m * part.act_groups + g) * kParts + half];
        for (int u = 0; u < U; u++) {
          P::F minimum = P::zero();
          if (C::kMinimum || C::kZeros) minimum = P::load(weights.minimum[u][g][half]);
          acc[u][m] = add_group<P, Format>(acc[u][m], dot[u][m], P::load(weights.scale[u][g][half]), minimum,
                                           a, total);
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

// Scales of group g of 32 k of a block, and what stands beside them, as add_group takes them.
template <int Format>
inline void load_scales(const uint8_t* block, const Layout* layout, int64_t g, float (*scale)[kBlockRows],
                        float (*minimum)[kBlockRows]) {
  using C = Codes<Format>;
  const int64_t at = C::kFixed ? g : g / (layout->group / kActGroup);
  const uint8_t* scales = block + layout->scale_offset + at * C::kParts * C::kPartBytes;
  const uint8_t* beside = block + layout->min_offset;
  const uint8_t* group_beside = beside + at * C::kBesideBytes;
  const uint16_t* super =
      reinterpret_cast<const uint16_t*>(beside + g / (kSuperGroup / kActGroup) * C::kSuperBytes);
  for (int half = 0; half < C::kParts; half++, scales += C::kPartBytes) {
    P::F value = P::scale<Format>(scales);
    if (Format == kNvfp4) value = P::mul(value, P::set1(float_at(beside) * 128.0f));
    if (C::kSuper) {
      P::F d = P::half(super);
      if (C::kTable) d = P::mul(d, P::set1(table_of(layout->format).factor));
      value = P::mul(value, d);
    }
    P::store(scale[half], value);
    if (C::kSuperMinima) {
      const P::F dmin = P::mul(P::half(super + kBlockRows), P::set1(-1.0f));
      P::store(minimum[half], P::mul(P::bytes(scales + kBlockRows), dmin));
    }
  }
  if (C::kMinima) P::store(minimum[0], P::half(reinterpret_cast<const uint16_t*>(group_beside)));
  if (C::kZeros) P::store(minimum[0], P::bytes(group_beside));
}

template <int Format, int U>
void section_blocks(const uint8_t* w, const Layout* layout, const Rows* x, float* y, int64_t ldy,
                    Section* weights) {
  using C = Codes<Format>;
  const int64_t groups = layout->k_pad / kActGroup;
  const int64_t tiles = (x->rows + kTileRows - 1) / kTileRows;
  const P::Lookup lookup = P::lookup(table_of(layout->format));
  for (int64_t first = 0; first < groups; first += kSection) {
    Part part = {{},     first,         groups - first < kSection ? groups - first : kSection,
                 groups, layout->k_pad, first == 0};
    for (int u = 0; u < U; u++) {
      const uint8_t* block = w + u * layout->block_bytes;
      part.codes[u] = C::kBytes ? block + first * 512 : weights->codes[u][0];
      for (int64_t g = 0; g < part.groups; g++) {
        fetch_group<Format, U>(block, layout, first + g);
        load_scales<Format>(block, layout, first + g, weights->scale[u][g], weights->minimum[u][g]);
        if (C::kBytes) continue;
        const P::W codes = P::decode<Format>(block + (first + g) * C::kGroupBytes, lookup);
        for (int i = 0; i < 8; i++) _mm512_store_si512(weights->codes[u][g] + 64 * i, codes.v[i]);
      }
    }
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t m0 = x->rows * t / tiles, m1 = x->rows * (t + 1) / tiles;
      section_rows<Format, kTileRows, U>(m1 - m0, part, *weights, x, m0, y, ldy);
    }
  }
}

template <int Format>
void all_blocks(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
                Section* weights) {
  int64_t b = 0;
  for (; b + kTileBlocks <= blocks; b += kTileBlocks)
    section_blocks<Format, kTileBlocks>(w + b * layout->block_bytes, layout, x, y + b * kBlockRows, ldy,
                                        weights);
  if (b < blocks)
    section_blocks<Format, 1>(w + b * layout->block_bytes, layout, x, y + b * kBlockRows, ldy, weights);
}

// The exact product for many rows. A load of activations serves two blocks, one of weights four rows, and
// eight dots run beside each other instead of one after the other; weights are decoded once for all rows.
template <int Format>
void many_rows(const uint8_t* w, int64_t blocks, const Layout* layout, const Rows* x, float* y, int64_t ldy,
               void* scratch) {
  if (x->rows <= kFewRows) return quant_kernel<P, Format, 8>(w, blocks, layout, x, y, ldy, scratch);
  Section* weights = static_cast<Section*>(scratch);
  if constexpr (Codes<Format>::kParts == 1) {
    all_blocks<Format>(w, blocks, layout, x, y, ldy, weights);
  } else {
    with_half_sums<P>(layout, x, static_cast<uint8_t*>(scratch) + sizeof(Section),
                      kScratchBytes - static_cast<int64_t>(sizeof(Section)),
                      [&](const Rows* part, int64_t m) {
                        all_blocks<Format>(w, blocks, layout, part, y + m * ldy, ldy, weights);
                      });
  }
}

template <int Format>
constexpr GemmFn gemv = quant_kernel<P, Format, 4>;
template <int Format>
constexpr GemmFn gemm = many_rows<Format>;

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
      {many_rows<kNvfp4>, "nvfp4.avx512_vnni.gemm"},
      {many_rows<kNvfp4>, "nvfp4.avx512_vnni.gemm"}},
     HETERO_KEPT_FORMATS("avx512_vnni"),
     {kNone, kNone, kNone}},
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

const IsaTable* avx512_vnni_unit() { return &kUnit; }

}  // namespace hetero
