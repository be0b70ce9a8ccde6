// The quantised formats by their numbers: what a kernel of exact.h must know of each. Codes are unsigned
// bytes after decoding: number + kZero, so that unsigned times signed instructions serve all of them.
#pragma once

#include "kernels.h"

namespace hetero {
namespace {

// kGroupBytes  bytes of 32 k of a block
// kZero, kMost the code of the number zero, the largest code
// kTable       whether the 4 bits are an index of kE2m1 rather than the code itself
// kParts       dots per 32 k, each with its own scale; kScaleBytes of one row's scale
template <int Bytes, int Zero, int Most, bool Table, int Parts, int ScaleBytes>
struct CodesOf {
  static constexpr int kGroupBytes = Bytes, kZero = Zero, kMost = Most, kParts = Parts;
  static constexpr int kScaleBytes = ScaleBytes;
  static constexpr bool kTable = Table;
};
template <int Format>
struct Codes;
template <>
struct Codes<kInt8> : CodesOf<512, 128, 255, false, 1, 2> {};
template <>
struct Codes<kInt4> : CodesOf<256, 8, 15, false, 1, 2> {};
template <>
struct Codes<kInt4a> : CodesOf<256, 0, 15, false, 1, 2> {};
template <>
struct Codes<kMxfp4> : CodesOf<256, 12, 24, true, 1, 1> {};
template <>
struct Codes<kNvfp4> : CodesOf<256, 12, 24, true, 2, 1> {};

// Twice the numbers of E2M1, plus 12.
alignas(16) constexpr uint8_t kE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Whether vpmaddubsw's 16-bit sums of `steps` steps stay below 32768: each adds two products.
template <int Format>
constexpr bool sums_fit(int steps) {
  return steps * 2 * Codes<Format>::kMost * 127 < 32768;
}

}  // namespace
}  // namespace hetero
