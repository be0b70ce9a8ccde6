// The quantised formats by their numbers: what packing and the kernels of exact.h must know of each. Codes
// are unsigned bytes after decoding: number + zero, so that unsigned times signed instructions serve all of
// them.
#pragma once

#include "kernels.h"

namespace hetero {
namespace {

// How scales are stored, and what may stand beside them (see kernels.h for the layouts).
enum class Scale : uint8_t { kNone, kHalf, kTiles, kE8m0, kE4m3, kUnsigned, kSigned, kRows };
enum class Beside : uint8_t { kNothing, kMinima, kZeros, kMatrix, kSuper, kSuperMinima };

struct Traits {
  uint8_t bits;      // of a code in a block: 2 to 6 and 8
  uint8_t group;     // 0: 32, 64 or 128, or none for floats
  uint8_t zero;      // decoded code of the number zero
  uint8_t most;      // largest decoded code
  bool table;        // a code is a place in a table, not the number
  uint8_t valid[2];  // lowest and highest code that packing takes
  uint8_t offset;    // what packing takes off codes
  Scale scale;
  Beside beside;
};

constexpr Traits kTraits[kFormats] = {
    {32, 0, 0, 0, false, {0, 0}, 0, Scale::kNone, Beside::kNothing},            // f32
    {16, 0, 0, 0, false, {0, 0}, 0, Scale::kNone, Beside::kNothing},            // bf16
    {8, 0, 128, 255, false, {0, 255}, 0, Scale::kHalf, Beside::kNothing},       // int8
    {4, 0, 8, 15, false, {0, 15}, 0, Scale::kHalf, Beside::kNothing},           // int4
    {4, 0, 0, 15, false, {0, 15}, 0, Scale::kHalf, Beside::kMinima},            // int4a
    {8, 128, 0, 0, false, {0, 255}, 0, Scale::kTiles, Beside::kNothing},        // fp8
    {4, 32, 12, 24, true, {0, 15}, 0, Scale::kE8m0, Beside::kNothing},          // mxfp4
    {4, 16, 12, 24, true, {0, 15}, 0, Scale::kE4m3, Beside::kMatrix},           // nvfp4
    {8, 0, 0, 255, false, {0, 255}, 0, Scale::kHalf, Beside::kMinima},          // int8a
    {4, 0, 0, 15, false, {0, 15}, 0, Scale::kHalf, Beside::kZeros},             // int4z
    {8, 0, 0, 255, false, {0, 255}, 0, Scale::kHalf, Beside::kZeros},           // int8z
    {4, 32, 128, 255, true, {0, 15}, 0, Scale::kHalf, Beside::kNothing},        // iq4_nl
    {4, 32, 0, 15, false, {0, 15}, 0, Scale::kUnsigned, Beside::kSuperMinima},  // q4_k
    {5, 32, 0, 31, false, {0, 31}, 0, Scale::kUnsigned, Beside::kSuperMinima},  // q5_k
    {2, 16, 0, 3, false, {0, 3}, 0, Scale::kUnsigned, Beside::kSuperMinima},    // q2_k
    {3, 16, 4, 7, false, {4, 11}, 4, Scale::kSigned, Beside::kSuper},           // q3_k
    {6, 16, 32, 63, false, {96, 159}, 96, Scale::kSigned, Beside::kSuper},      // q6_k
    {4, 32, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq4_xs
    {4, 32, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq3_xxs
    {4, 32, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq3_s
    {3, 32, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq2_xxs
    {3, 16, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq2_xs
    {3, 16, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq2_s
    {3, 32, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq1_s
    {3, 16, 128, 255, true, {0, 15}, 0, Scale::kSigned, Beside::kSuper},        // iq1_m
    {8, 128, 0, 0, false, {0, 255}, 0, Scale::kRows, Beside::kNothing},         // fp8_row
};

constexpr int64_t kSuperGroup = 256;  // k that share d and dmin
constexpr int kMostInteger = 63;      // largest integer scale or minimum, but of q6_k

// Whether codes are E4M3, which kernels multiply with floats.
constexpr bool is_fp8(int32_t format) { return format == kFp8 || format == kFp8Row; }

constexpr bool has_super(const Traits& t) {
  return t.beside == Beside::kSuper || t.beside == Beside::kSuperMinima;
}

// A table's numbers by stored code, plus its zero. Where 3 bits are stored they are bits 0, 1 and 3 of the
// code. hetero/quant/iq_tables.py says where those of the iq types come from; a code that stands for nothing
// is a zero.
struct Table {
  alignas(16) uint8_t codes[16];
  uint16_t used;  // bit by code, as packing takes it
  float factor;   // what an integer scale counts beside d
};
constexpr Table kE2m1 = {{12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}, 0xffff, 0.5f};
constexpr Table kIq4 = {
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}, 0xffff, 1.0f};
constexpr Table kIq3Even = {
    {130, 134, 138, 142, 146, 150, 154, 159, 126, 122, 118, 114, 110, 106, 102, 97}, 0xffff, 0.5f};
constexpr Table kIq3Odd = {
    {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113}, 0xffff, 1.0f};
constexpr Table kIq2 = {
    {136, 153, 171, 128, 120, 103, 85, 128, 128, 128, 128, 128, 128, 128, 128, 128}, 0x0707, 0.125f};
constexpr Table kIq1 = {
    {121, 129, 137, 128, 119, 127, 135, 128, 128, 128, 128, 128, 128, 128, 128, 128}, 0x0707, 0.125f};

inline const Table& table_of(int32_t format) {
  switch (format) {
    case kIq4Nl:
    case kIq4Xs:
      return kIq4;
    case kIq3Xxs:
      return kIq3Even;
    case kIq3S:
      return kIq3Odd;
    case kIq2Xxs:
    case kIq2Xs:
    case kIq2S:
      return kIq2;
    case kIq1S:
    case kIq1M:
      return kIq1;
    default:
      return kE2m1;
  }
}

// kGroupBytes  bytes of 32 k of a block
// kParts       dots per 32 k, each with its own scale; kScaleBytes of one row's scale
// kPartBytes   of the scales of 16 rows, with minima that lie between them
template <int Format>
struct Codes {
  static constexpr Traits kOf = kTraits[Format];
  static constexpr int kGroupBytes = kOf.bits * 64, kZero = kOf.zero, kMost = kOf.most;
  static constexpr int kParts = kOf.group == 16 ? 2 : 1;
  static constexpr int kScaleBytes = kOf.scale == Scale::kHalf ? 2 : 1;
  static constexpr int kBits = kOf.bits;
  static constexpr bool kBytes = kBits == 8, kTable = kOf.table, kFixed = kOf.group != 0;
  static constexpr bool kZeros = kOf.beside == Beside::kZeros, kMinima = kOf.beside == Beside::kMinima;
  static constexpr bool kSuper = has_super(kOf), kSuperMinima = kOf.beside == Beside::kSuperMinima;
  static constexpr bool kMinimum = kMinima || kSuperMinima;
  static constexpr int kPartBytes = kBlockRows * kScaleBytes * (kSuperMinima ? 2 : 1);
  // Bytes of minima or zeros of 16 rows and a group, of d and dmin of 16 rows and 256 k.
  static constexpr int kBesideBytes = kMinima ? 2 * kBlockRows : kZeros ? kBlockRows : 0;
  static constexpr int kSuperBytes = kSuperMinima ? 4 * kBlockRows : 2 * kBlockRows;
};

// How many steps of two products each vpmaddubsw's 16-bit sums hold; none: a step must be of signed numbers.
template <int Format>
constexpr int kStepsThatFit = 32767 / (2 * (kTraits[Format].most ? kTraits[Format].most : 1) * 127);

// Whether vpmaddubsw's 16-bit sums of `steps` steps stay below 32768.
template <int Format>
constexpr bool sums_fit(int steps) {
  return steps <= kStepsThatFit<Format>;
}

}  // namespace
}  // namespace hetero
