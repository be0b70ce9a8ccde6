// Packing of values that are quantised already: codes, scales and extras into the layout of kernels.h.
#include <string.h>

#include <algorithm>

#include "codes.h"
#include "pack.h"
#include "pack_sizes.h"

namespace hetero {
namespace {

// The lowest and the highest of `count` bytes.
HETERO_CLONES void byte_range(const uint8_t* bytes, int64_t count, uint8_t* low, uint8_t* high) {
  uint8_t least = 255, most = 0;
  for (int64_t i = 0; i < count; i++) {
    least = bytes[i] < least ? bytes[i] : least;
    most = bytes[i] > most ? bytes[i] : most;
  }
  *low = least;
  *high = most;
}

// Whether all of `count` codes below 16 are among the bits of `used`.
HETERO_CLONES bool all_used(const uint8_t* codes, int64_t count, uint32_t used) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; i++) bad |= ~used >> (codes[i] & 15) & 1u;
  return bad == 0;
}

// Whether one of `count` codes of E4M3 is NaN.
HETERO_CLONES bool any_nan(const uint8_t* codes, int64_t count) {
  uint8_t bad = 0;
  for (int64_t i = 0; i < count; i++) bad |= static_cast<uint8_t>((codes[i] & 0x7f) == 0x7f);
  return bad != 0;
}

HETERO_CLONES bool halves_finite(const uint16_t* halves, int64_t count) {
  uint16_t bad = 0;
  for (int64_t i = 0; i < count; i++) bad |= static_cast<uint16_t>((halves[i] & 0x7c00) == 0x7c00);
  return bad == 0;
}

}  // namespace

const char* wrong_codes(const Layout& layout, const Quantised& q) {
  const Traits& t = kTraits[layout.format];
  const int64_t count = layout.n * layout.k, per_row = (layout.k + layout.group - 1) / layout.group;
  const int64_t scale_count = layout.n * row_scale_bytes(layout), extra = layout.n * row_extra_bytes(layout);
  const uint8_t* bytes = static_cast<const uint8_t*>(q.scales);
  const float *floats = static_cast<const float*>(q.scales), *matrix = static_cast<const float*>(q.extra);
  // The kernels multiply these by 256.
  auto fits = [](float x) { return x >= -0x1p119f && x <= 0x1p119f; };
  if (is_fp8(layout.format)) {
    const int64_t scales = t.scale == Scale::kRows ? layout.n : (layout.n + 127) / 128 * per_row;
    if (any_nan(q.codes, count)) return "a code is NaN (0x7f or 0xff)";
    return std::all_of(floats, floats + scales, fits) ? nullptr : "a scale is not finite or too large";
  }
  uint8_t low, high;
  byte_range(q.codes, count, &low, &high);
  if (high > t.valid[1] || low < t.valid[0])
    return t.valid[1] == 15 ? "a code is above 15" : "a code is beyond those of the format";
  if (t.table && !all_used(q.codes, count, table_of(layout.format).used))
    return "a code is not one of the format's table";
  if (t.scale == Scale::kE8m0 && std::find(bytes, bytes + scale_count, 255) != bytes + scale_count)
    return "a scale is NaN (E8M0 255)";
  if (t.scale == Scale::kE4m3) {
    if (any_nan(bytes, scale_count)) return "a scale is NaN (0x7f or 0xff)";
    if (!fits(*matrix)) return "the scale of the matrix is not finite or too large";
  }
  // Of q6_k any int8 is: see MOST_SCALE of hetero/quant/k_formats.py.
  if ((t.scale == Scale::kUnsigned || t.scale == Scale::kSigned) && layout.format != kQ6K) {
    auto too_large = [&](uint8_t x) {
      return t.scale == Scale::kSigned ? static_cast<int8_t>(x) > kMostInteger : x > kMostInteger;
    };
    if (std::any_of(bytes, bytes + scale_count, too_large)) return "an integer scale is above 63";
  }
  if (t.scale == Scale::kHalf && !halves_finite(static_cast<const uint16_t*>(q.scales), scale_count / 2))
    return "a scale or minimum is not finite";
  if ((t.beside == Beside::kMinima || has_super(t)) &&
      !halves_finite(static_cast<const uint16_t*>(q.extra), extra / 2))
    return "a scale or minimum is not finite";
  if (layout.format == kInt4z) {
    byte_range(static_cast<const uint8_t*>(q.extra), extra, &low, &high);
    if (high > 15) return "a zero is above 15";
  }
  return nullptr;
}

int64_t row_scale_bytes(const Layout& layout) {
  const Traits& t = kTraits[layout.format];
  if (t.scale == Scale::kNone || t.scale == Scale::kTiles) return 0;
  if (t.scale == Scale::kRows) return 4;
  return (layout.k + layout.group - 1) / layout.group * numbers(t) * number_bytes(t);
}

int64_t row_extra_bytes(const Layout& layout) {
  const Traits& t = kTraits[layout.format];
  const int64_t groups = layout.group == 0 ? 0 : (layout.k + layout.group - 1) / layout.group;
  if (t.beside == Beside::kMinima) return 2 * groups;
  if (t.beside == Beside::kZeros) return groups;
  return has_super(t) ? (layout.k + kSuperGroup - 1) / kSuperGroup * numbers(t) * 2 : 0;
}

namespace {

// Numbers of 16 rows, `count` of `bytes` bytes each, to [count][16]; zeros for rows that do not exist and
// from `count` up to `padded`.
template <int Bytes>
void interleave(const uint8_t* const* rows, int64_t count, int64_t padded, uint8_t fill, uint8_t* out) {
  for (int64_t r = 0; r < kRows; r++) {
    const uint8_t* from = rows[r];
    uint8_t* to = out + r * Bytes;
    int64_t i = 0;
    if (from != nullptr)
      for (; i < count; i++, to += kRows * Bytes) memcpy(to, from + i * Bytes, Bytes);
    for (; i < padded; i++, to += kRows * Bytes) memset(to, fill, Bytes);
  }
}

inline uint32_t four_codes(const uint8_t* codes) {
  uint32_t four;
  memcpy(&four, codes, 4);
  return four;
}

inline void put_four(uint8_t* to, uint32_t four) { memcpy(to, &four, 4); }

// Codes of 32 k of a row into the block's steps of 64 bytes; kernels.h has the planes.
template <int Bits, bool Table>
void store_group(const uint8_t* codes, uint32_t less, uint8_t* out) {
  uint32_t c[8];
  for (int s = 0; s < 8; s++) {
    c[s] = four_codes(codes + 4 * s) - less;  // no code is below what is taken off
    if (Table) c[s] = (c[s] & 0x03030303u) | (c[s] >> 1 & 0x04040404u);
  }
  constexpr int kLow = Bits == 8 ? 8 : Bits >= 4 ? 4 : 2;
  constexpr uint32_t kMask = (kLow == 4 ? 15u : 3u) * 0x01010101u;
  if (kLow == 8)
    for (int s = 0; s < 8; s++) put_four(out + 64 * s, c[s]);
  if (kLow == 4)
    for (int i = 0; i < 4; i++) put_four(out + 64 * i, (c[2 * i] & kMask) | (c[2 * i + 1] & kMask) << 4);
  auto pairs = [&](int shift, uint8_t* to) {
    for (int i = 0; i < 2; i++) {
      uint32_t all = 0;
      for (int j = 0; j < 4; j++) all |= (c[4 * i + j] >> shift & 0x03030303u) << 2 * j;
      put_four(to + 64 * i, all);
    }
  };
  if (kLow == 2) pairs(0, out);
  if (Bits == 6) pairs(4, out + 64 * kLow);
  if (Bits == 3 || Bits == 5) {
    uint32_t all = 0;
    for (int j = 0; j < 8; j++) all |= (c[j] >> kLow & 0x01010101u) << j;
    put_four(out + 64 * kLow, all);
  }
}

constexpr uint16_t kSixNumbers = 0x0707;
using StoreFn = void (*)(const uint8_t*, uint32_t, uint8_t*);

StoreFn store_fn(const Layout& layout) {
  const Traits& t = kTraits[layout.format];
  const bool six = t.table && table_of(layout.format).used == kSixNumbers;
  switch (t.bits) {
    case 2:
      return store_group<2, false>;
    case 3:
      return six ? store_group<3, true> : store_group<3, false>;
    case 4:
      return store_group<4, false>;
    case 5:
      return store_group<5, false>;
    case 6:
      return store_group<6, false>;
    default:
      return store_group<8, false>;
  }
}

}  // namespace

void pack_code_rows(const Layout& layout, const CodeRows& rows, uint8_t* out) {
  const Traits& t = kTraits[layout.format];
  const int64_t groups = group_count(layout), real = (layout.k + layout.group - 1) / layout.group;
  const int64_t whole = layout.k / kActGroup * kActGroup;
  // Table codes of padding may stand for any number: its scales are zeros, and so are the activations.
  const uint8_t padding = t.table ? 0 : static_cast<uint8_t>(t.zero + t.offset);
  const StoreFn store = store_fn(layout);
  const uint32_t less = t.offset * 0x01010101u;
  store_padding(layout, out);
  for (int64_t r = 0; r < kRows; r++) {
    uint8_t* to = out + 4 * r;
    uint8_t end[kActGroup];
    memset(end, padding, sizeof end);
    const uint8_t* codes = rows.codes[r];
    int64_t k = 0;
    for (; codes != nullptr && k < whole; k += kActGroup, to += 64 * t.bits) store(codes + k, less, to);
    if (codes != nullptr && k < layout.k) {
      memcpy(end, codes + k, static_cast<size_t>(layout.k - k));
      store(end, less, to);
      memset(end, padding, sizeof end);
      k += kActGroup, to += 64 * t.bits;
    }
    for (; k < layout.k_pad; k += kActGroup, to += 64 * t.bits) store(end, less, to);
  }
  uint8_t *scale = out + layout.scale_offset, *beside = out + layout.min_offset;
  if (t.scale == Scale::kTiles) return static_cast<void>(memcpy(scale, rows.scales[0], real * 4));
  if (t.scale == Scale::kRows) return interleave<4>(rows.scales, 1, 1, 0, scale);
  if (t.scale == Scale::kHalf)
    interleave<2>(rows.scales, real, groups, 0, scale);
  else if (numbers(t) == 1)
    interleave<1>(rows.scales, real, groups, t.scale == Scale::kE8m0 ? 127 : 0, scale);
  else
    interleave<1>(rows.scales, 2 * real, 2 * groups, 0, scale);
  if (t.beside == Beside::kMatrix) memcpy(beside, rows.extra[0], 4);
  if (t.beside == Beside::kMinima) interleave<2>(rows.extra, real, groups, 0, beside);
  if (t.beside == Beside::kZeros) interleave<1>(rows.extra, real, groups, 0, beside);
  if (has_super(t)) {
    const int64_t supers = (layout.k + kSuperGroup - 1) / kSuperGroup;
    interleave<2>(rows.extra, supers * numbers(t), super_count(layout) * numbers(t), 0, beside);
  }
}

void pack_codes_block(const Layout& layout, int64_t block, const Quantised& q, uint8_t* out) {
  const uint8_t *scales = static_cast<const uint8_t*>(q.scales),
                *extra = static_cast<const uint8_t*>(q.extra);
  const int64_t per_scale = row_scale_bytes(layout), per_extra = row_extra_bytes(layout);
  if (layout.format == kFp8) scales += block * kRows / 128 * group_count(layout) * 4;
  CodeRows rows;
  for (int64_t r = 0; r < kRows; r++) {
    const int64_t row = block * kRows + r;
    const bool inside = row < layout.n;
    rows.codes[r] = inside ? q.codes + row * layout.k : nullptr;
    rows.scales[r] = inside ? scales + row * per_scale : nullptr;
    rows.extra[r] = inside && extra != nullptr ? extra + row * per_extra : nullptr;
  }
  pack_code_rows(layout, rows, out);
}

}  // namespace hetero
