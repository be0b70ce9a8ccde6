// What the files that pack blocks share: sizes of a block's parts, and how their loops are compiled.
#pragma once

#include <string.h>

#include "codes.h"

// The loops over 16 rows are compiled for several instruction sets and chosen by the loader; contraction is
// off, so that the results do not depend on the choice.
#define HETERO_CLONES __attribute__((target_clones("default", "avx2", "avx512f"), optimize("O3")))

namespace hetero {
namespace {

constexpr int kRows = kBlockRows;

inline int64_t group_count(const Layout& layout) { return layout.k_pad / layout.group; }
inline int64_t super_count(const Layout& layout) { return (layout.k_pad + kSuperGroup - 1) / kSuperGroup; }
// Numbers that stand side by side for a group: scale and minimum; d and dmin.
inline int64_t numbers(const Traits& t) { return t.beside == Beside::kSuperMinima ? 2 : 1; }
// Bytes of such a number.
inline int64_t number_bytes(const Traits& t) { return t.scale == Scale::kHalf ? 2 : 1; }

inline bool small_float(const Layout& layout) { return layout.format >= kFp8 && layout.format <= kNvfp4; }

inline int64_t scale_bytes(const Layout& layout) {
  const Traits& t = kTraits[layout.format];
  if (t.scale == Scale::kNone) return 0;
  if (t.scale == Scale::kTiles) return group_count(layout) * 4;
  if (t.scale == Scale::kRows) return kRows * 4;
  return group_count(layout) * numbers(t) * kRows * number_bytes(t);
}

inline int64_t extra_bytes(const Layout& layout) {
  const Traits& t = kTraits[layout.format];
  switch (t.beside) {
    case Beside::kNothing:
      return 0;
    case Beside::kMinima:
      return group_count(layout) * kRows * 2;
    case Beside::kZeros:
      return group_count(layout) * kRows;
    case Beside::kMatrix:
      return 4;
    default:
      return super_count(layout) * numbers(t) * kRows * 2;
  }
}

inline void store_padding(const Layout& layout, uint8_t* out) {
  const int64_t end = layout.min_offset + extra_bytes(layout);
  memset(out + end, 0, static_cast<size_t>(layout.block_bytes - end));
}

}  // namespace
}  // namespace hetero
