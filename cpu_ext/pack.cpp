// Packing of weights into blocks of 16 rows, and back. The arithmetic is float32, one operation at a time in
// a fixed order, so that hetero/quant/pack.py reproduces every bit.
#include "pack.h"

#include <string.h>

#include <algorithm>

#include "bits.h"
#include "codes.h"
#include "pack_sizes.h"

namespace hetero {
namespace {

constexpr int kMaxGroup = 128;
constexpr int64_t kMaxK = 1 << 19;  // the scratch of a kernel holds what it needs of one row
constexpr int64_t kTileBlocks = 8;  // blocks that share the scales of fp8: 128 rows
constexpr float kMostE4m3 = 448.0f, kMostE2m1 = 6.0f;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: rounds to an integer, ties to even
constexpr float kHalfMax = 65504.0f;
// Scales tried for int4: the signed maximum divided by these. The first is the plain one; another is taken
// where its squared error is smaller.
constexpr int kCandidates = 7;
constexpr float kDivisors[kCandidates] = {-8.0f, -8.5f, -7.2f, -8.2f, -7.8f, -8.9f, -9.4f};

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f;
  const uint32_t normal = (rest << 13) + (112u << 23);
  const uint32_t special = (rest << 13) + (224u << 23);
  const uint32_t value = rest < 0x400u ? float_to_bits(subnormal) : rest < 0x7c00u ? normal : special;
  return bits_to_float(sign | value);
}

// To nearest, ties to even; infinite from 65520 on; no NaN comes here.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  // Adding 0.5 moves the subnormal's 10 bits to the end of the mantissa, rounded by the addition itself.
  const uint32_t subnormal = float_to_bits(bits_to_float(rest) + 0.5f) - float_to_bits(0.5f);
  const uint32_t normal = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
  const uint32_t value16 = rest < (113u << 23)              ? subnormal
                           : rest < float_to_bits(65520.0f) ? normal
                                                            : 0x7c00u;
  return static_cast<uint16_t>(sign | value16);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float bf16_to_float(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

inline float e4m3_to_float(uint8_t code) {
  return half_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

// To nearest, ties to even; beyond 448 the largest. A zero keeps its sign.
inline uint8_t float_to_e4m3(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 24 & 0x80u;
  const uint32_t rest = bits & 0x7fffffffu;
  const uint32_t most = float_to_bits(kMostE4m3);
  const uint32_t bounded = rest < most ? rest : most;
  // The numbers below 2^-6 are multiples of 2^-9; adding 2^14 rounds to one.
  const uint32_t subnormal = float_to_bits(bits_to_float(bounded) + 16384.0f) - float_to_bits(16384.0f);
  const uint32_t normal = ((bounded + 0x7ffffu + (bounded >> 20 & 1u)) >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (bounded < (121u << 23) ? subnormal : normal));
}

// To nearest, ties to the even code; beyond 6 the largest. Zero has no sign.
inline uint8_t float_to_e2m1(float value) {
  const float x = value < 0 ? -value : value;
  const int code =
      (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.0f);
  return static_cast<uint8_t>(code != 0 && value < 0 ? code | 8 : code);
}

constexpr float kE2m1Numbers[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
inline float e2m1_to_float(int code) { return code & 8 ? -kE2m1Numbers[code & 7] : kE2m1Numbers[code]; }

inline float e8m0_to_float(uint8_t e) {
  return bits_to_float(e == 0 ? 0x00400000u : static_cast<uint32_t>(e) << 23);
}

inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

inline float round_even(float x) { return (x + kRoundMagic) - kRoundMagic; }

// A group of up to 128 k for 16 rows, k-major, zero where there is no weight.
struct Group {
  alignas(64) float v[kMaxGroup][kRows];
};

template <typename T, typename Convert>
inline void gather(const Source& source, int64_t row, int64_t rows, int64_t k0, int64_t count, Group* group,
                   Convert convert) {
  for (int64_t r = 0; r < rows; r++) {
    const T* p = static_cast<const T*>(source.data) + (row + r) * source.row_stride + k0 * source.col_stride;
    for (int64_t i = 0; i < count; i++) group->v[i][r] = convert(p[i * source.col_stride]);
  }
}

// Values [row, row + 16) x [k0, k0 + size) of the source.
void load_group(const Layout& layout, const Source& source, int64_t row, int64_t k0, int64_t size,
                Group* group) {
  const int64_t rows = layout.n - row < kRows ? layout.n - row : kRows;
  const int64_t count = layout.k - k0 < size ? layout.k - k0 : size;
  if (rows < kRows || count < size) memset(group->v, 0, static_cast<size_t>(size) * kRows * sizeof(float));
  if (count <= 0) return;
  if (source.type == kSourceF32)
    gather<float>(source, row, rows, k0, count, group, [](float x) { return x; });
  else if (source.type == kSourceBf16)
    gather<uint16_t>(source, row, rows, k0, count, group, bf16_to_float);
  else
    gather<uint16_t>(source, row, rows, k0, count, group, half_to_float);
}

HETERO_CLONES bool all_finite(const Group& group, int64_t size) {
  uint32_t most = 0;
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r++) {
      const uint32_t bits = float_to_bits(group.v[i][r]) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
  return most < 0x7f800000u;
}

// The value of largest magnitude of each row, the first of equals.
HETERO_CLONES void signed_maximum(const Group& group, int64_t size, float* best) {
  float most[kRows] = {0};
  for (int r = 0; r < kRows; r++) best[r] = 0;
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r++) {
      const float x = group.v[i][r], magnitude = x < 0 ? -x : x;
      best[r] = magnitude > most[r] ? x : best[r];
      most[r] = magnitude > most[r] ? magnitude : most[r];
    }
}

HETERO_CLONES void extremes(const Group& group, int64_t size, float* low, float* high) {
  for (int r = 0; r < kRows; r++) low[r] = high[r] = group.v[0][r];
  for (int64_t i = 1; i < size; i++)
    for (int r = 0; r < kRows; r++) {
      const float x = group.v[i][r];
      low[r] = x < low[r] ? x : low[r];
      high[r] = x > high[r] ? x : high[r];
    }
}

// fp16 scale, its float32 value and the reciprocal (0 for 0).
HETERO_CLONES void round_scale(const float* scale, uint16_t* half, float* value, float* inverse) {
  for (int r = 0; r < kRows; r++) {
    half[r] = float_to_half(scale[r]);
    value[r] = half_to_float(half[r]);
    inverse[r] = value[r] == 0 ? 0 : 1.0f / value[r];
  }
}

// Squared error of the group under a scale: codes rounded against it, differences squared and added in order.
HETERO_CLONES void squared_error(const Group& group, int64_t size, const float* value, const float* inverse,
                                 float* error) {
  float total[kRows] = {0};
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r++) {
      const float x = group.v[i][r];
      const float code = round_even(clamp(x * inverse[r], -8.0f, 7.0f));
      const float difference = x - code * value[r];
      total[r] += difference * difference;
    }
  for (int r = 0; r < kRows; r++) error[r] = total[r];
}

// codes[i][r] = round((v - offset) * inverse), clamped, plus zero
HETERO_CLONES void round_codes(const Group& group, int64_t size, const float* inverse, const float* offset,
                               float low, float high, float zero, uint8_t (*codes)[kRows]) {
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r++) {
      const float scaled = (group.v[i][r] - offset[r]) * inverse[r];
      codes[i][r] = static_cast<uint8_t>(static_cast<int32_t>(round_even(clamp(scaled, low, high)) + zero));
    }
}

// Codes of `size` k (a multiple of 8) of 16 rows into the steps of the block.
void store_codes(const Layout& layout, int64_t k0, int64_t size, const uint8_t (*codes)[kRows],
                 uint8_t* out) {
  if (kTraits[layout.format].bits == 8) {
    uint8_t* p = out + k0 / 4 * 64;
    for (int64_t i = 0; i < size; i += 4)
      for (int r = 0; r < kRows; r++)
        for (int j = 0; j < 4; j++) *p++ = codes[i + j][r];
    return;
  }
  uint8_t* p = out + k0 / 8 * 64;
  for (int64_t i = 0; i < size; i += 8)
    for (int r = 0; r < kRows; r++)
      for (int j = 0; j < 4; j++) *p++ = static_cast<uint8_t>(codes[i + j][r] | codes[i + 4 + j][r] << 4);
}

PackStatus pack_floats(const Layout& layout, int64_t row, const Source& source, uint8_t* out) {
  Group group;
  for (int64_t k0 = 0; k0 < layout.k_pad; k0 += kActGroup) {
    load_group(layout, source, row, k0, kActGroup, &group);
    if (!all_finite(group, kActGroup)) return kPackNotFinite;
    if (layout.format == kF32) {
      memcpy(out + k0 * 64, group.v, kActGroup * 64);
      continue;
    }
    uint8_t* p = out + k0 * 32;
    for (int i = 0; i < kActGroup; i += 2)
      for (int r = 0; r < kRows; r++, p += 4) {
        const uint16_t pair[2] = {float_to_bf16(group.v[i][r]), float_to_bf16(group.v[i + 1][r])};
        if ((pair[0] & 0x7fff) == 0x7f80 || (pair[1] & 0x7fff) == 0x7f80) return kPackOverflow;
        memcpy(p, pair, 4);
      }
  }
  return kPackOk;
}

// Scale (and minimum) of one group of 16 rows, and its codes.
PackStatus quantise_group(const Layout& layout, const Group& group, int64_t size, int64_t real,
                          uint16_t* scale16, uint16_t* min16, uint8_t (*codes)[kRows]) {
  float scale[kRows], value[kRows], inverse[kRows], zeros[kRows] = {0};
  if (layout.format == kInt4a) {
    float low[kRows], high[kRows], minimum[kRows];
    extremes(group, real, low, high);
    for (int r = 0; r < kRows; r++) {
      min16[r] = float_to_half(low[r] + 0.0f);  // no negative zero
      minimum[r] = half_to_float(min16[r]);
      scale[r] = (high[r] - low[r]) / 15.0f;
      if (!(low[r] >= -kHalfMax && low[r] <= kHalfMax && scale[r] <= kHalfMax)) return kPackOverflow;
    }
    round_scale(scale, scale16, value, inverse);
    round_codes(group, size, inverse, minimum, 0.0f, 15.0f, 0.0f, codes);
    for (int64_t i = real; i < size; i++) memset(codes[i], 0, kRows);
    return kPackOk;
  }
  float most[kRows];
  signed_maximum(group, real, most);
  if (layout.format == kInt8) {
    for (int r = 0; r < kRows; r++) {
      scale[r] = (most[r] < 0 ? -most[r] : most[r]) / 127.0f;
      if (!(scale[r] <= kHalfMax)) return kPackOverflow;
    }
    round_scale(scale, scale16, value, inverse);
    round_codes(group, size, inverse, zeros, -127.0f, 127.0f, 128.0f, codes);
    return kPackOk;
  }
  float best_error[kRows], best_inverse[kRows];
  for (int c = 0; c < kCandidates; c++) {
    uint16_t half[kRows];
    float error[kRows];
    for (int r = 0; r < kRows; r++) {
      scale[r] = most[r] / kDivisors[c] + 0.0f;  // no negative zero
      if (c == 0 && !(scale[r] <= kHalfMax && scale[r] >= -kHalfMax)) return kPackOverflow;
    }
    round_scale(scale, half, value, inverse);
    squared_error(group, real, value, inverse, error);
    for (int r = 0; r < kRows; r++) {
      if (c > 0 && !(error[r] < best_error[r] && scale[r] <= kHalfMax && scale[r] >= -kHalfMax)) continue;
      best_error[r] = error[r];
      scale16[r] = half[r];
      best_inverse[r] = inverse[r];
    }
  }
  round_codes(group, size, best_inverse, zeros, -8.0f, 7.0f, 8.0f, codes);
  return kPackOk;
}

HETERO_CLONES void largest(const Group& group, int64_t size, float* most) {
  for (int r = 0; r < kRows; r++) most[r] = 0;
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r++) {
      const float x = group.v[i][r], magnitude = x < 0 ? -x : x;
      most[r] = magnitude > most[r] ? magnitude : most[r];
    }
}

HETERO_CLONES void round_e4m3(const Group& group, int64_t size, float inverse, uint8_t (*codes)[kRows]) {
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r++) codes[i][r] = float_to_e4m3(group.v[i][r] * inverse);
}

HETERO_CLONES void round_e2m1(const Group& group, int64_t size, const float* inverse,
                              uint8_t (*codes)[kRows]) {
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r++) codes[i][r] = float_to_e2m1(group.v[i][r] * inverse[r]);
}

// One group of 16 rows of the formats of small floats: its codes, and its scales at `scale`.
void quantise_floats(const Layout& layout, const Group& group, float shared, uint8_t* scale,
                     uint8_t (*codes)[kRows]) {
  float most[kRows], inverse[kRows];
  if (layout.format == kFp8) {
    memcpy(scale, &shared, 4);
    return round_e4m3(group, layout.group, shared == 0 ? 0 : 1.0f / shared, codes);
  }
  largest(group, layout.group, most);
  for (int r = 0; r < kRows; r++) {
    if (layout.format == kMxfp4) {
      // Of the largest's exponent 2 is the number's own, whose largest is 6 = 1.5 * 2^2. Zeros get 2^0.
      const uint32_t exponent = float_to_bits(most[r]) >> 23;
      const uint32_t e = most[r] == 0 ? 127 : exponent > 2 ? exponent - 2 : 0;
      scale[r] = static_cast<uint8_t>(e);
      inverse[r] = bits_to_float((254 - e) << 23);
    } else {
      scale[r] = shared == 0 ? 0 : float_to_e4m3(most[r] / kMostE2m1 / shared);
      const float value = e4m3_to_float(scale[r]) * shared;
      inverse[r] = value == 0 ? 0 : 1.0f / value;
    }
  }
  round_e2m1(group, layout.group, inverse, codes);
}

bool has_group(int32_t format, int32_t group) {
  if (kTraits[format].scale == Scale::kNone) return group == 0;
  if (kTraits[format].group != 0) return group == kTraits[format].group;
  return group == 32 || group == 64 || group == 128;
}

bool small_float(const Layout& layout) { return layout.format >= kFp8 && layout.format <= kNvfp4; }

}  // namespace

bool make_layout(int32_t format, int32_t group, int64_t n, int64_t k, Layout* layout) {
  if (format < 0 || format >= kFormats || n < 1 || k < 1 || k > kMaxK) return false;
  if (!has_group(format, group)) return false;
  const int64_t unit = group > kActGroup ? group : kActGroup;
  layout->format = format;
  layout->group = group;
  layout->n = n;
  layout->k = k;
  layout->n_pad = (n + kRows - 1) / kRows * kRows;
  layout->k_pad = (k + unit - 1) / unit * unit;
  layout->scale_offset = layout->k_pad * kTraits[format].bits / 8 * kRows;
  layout->min_offset = layout->scale_offset + scale_bytes(*layout);
  layout->block_bytes = (layout->min_offset + extra_bytes(*layout) + 63) / 64 * 64;
  return true;
}

int64_t expert_bytes(const Layout& up, const Layout& down, bool has_gate, bool has_bias) {
  int64_t bytes = packed_bytes(up) * (has_gate ? 2 : 1) + packed_bytes(down);
  if (has_bias) bytes += 4 * (up.n * (has_gate ? 2 : 1) + down.n);
  return (bytes + 63) / 64 * 64;
}

int64_t shared_per_block(const Layout& layout) {
  return layout.format == kFp8 ? layout.k_pad / layout.group : layout.format == kNvfp4 ? 1 : 0;
}

PackStatus measure_block(const Layout& layout, int64_t block, const Source& source, float* shared) {
  Group group;
  float most[kRows];
  const int64_t per_block = shared_per_block(layout), size = layout.format == kFp8 ? layout.group : kActGroup;
  if (per_block == 0) return kPackOk;
  float* to = shared + block * per_block;
  *to = 0;
  for (int64_t k0 = 0; k0 < layout.k_pad; k0 += size) {
    load_group(layout, source, block * kRows, k0, size, &group);
    if (!all_finite(group, size)) return kPackNotFinite;
    largest(group, size, most);
    const float amax = *std::max_element(most, most + kRows);
    if (layout.format == kFp8)
      *to++ = amax;
    else
      *to = std::max(*to, amax);
  }
  return kPackOk;
}

void settle_shared(const Layout& layout, float* shared) {
  const int64_t per_block = shared_per_block(layout), blocks = block_count(layout);
  const int64_t together = layout.format == kFp8 ? kTileBlocks : blocks;
  const float most = layout.format == kFp8 ? kMostE4m3 : kMostE4m3 * kMostE2m1;
  for (int64_t b0 = 0; b0 < blocks; b0 += together)
    for (int64_t i = 0; i < per_block; i++) {
      const int64_t end = std::min(b0 + together, blocks);
      float amax = 0;
      for (int64_t b = b0; b < end; b++) amax = std::max(amax, shared[b * per_block + i]);
      // Below kTinyAmax the reciprocals would overflow.
      const float scale = amax < kTinyAmax ? 0 : amax / most;
      for (int64_t b = b0; b < end; b++) shared[b * per_block + i] = scale;
    }
}

PackStatus pack_block(const Layout& layout, int64_t block, const Source& source, const float* shared,
                      uint8_t* out) {
  const int64_t row = block * kRows;
  if (layout.group == 0) return pack_floats(layout, row, source, out);
  if (layout.format > kNvfp4) return kPackKeptOnly;
  Group group;
  uint8_t codes[kMaxGroup][kRows];
  uint16_t* scale = reinterpret_cast<uint16_t*>(out + layout.scale_offset);
  uint16_t* minimum = reinterpret_cast<uint16_t*>(out + layout.min_offset);
  store_padding(layout, out);
  if (layout.format == kNvfp4) memcpy(out + layout.min_offset, shared + block, 4);
  for (int64_t k0 = 0; k0 < layout.k_pad; k0 += layout.group, scale += kRows, minimum += kRows) {
    const int64_t real = layout.k - k0 < layout.group ? layout.k - k0 : layout.group;
    load_group(layout, source, row, k0, layout.group, &group);
    if (!all_finite(group, real)) return kPackNotFinite;
    if (small_float(layout)) {
      const int64_t g = k0 / layout.group;
      const int64_t at = layout.format == kFp8 ? 4 * g : kRows * g;
      const float common = layout.format == kFp8     ? shared[block * (layout.k_pad / layout.group) + g]
                           : layout.format == kNvfp4 ? shared[block]
                                                     : 0;
      quantise_floats(layout, group, common, out + layout.scale_offset + at, codes);
      store_codes(layout, k0, layout.group, codes, out);
      continue;
    }
    const PackStatus status = quantise_group(layout, group, layout.group, real, scale, minimum, codes);
    if (status != kPackOk) return status;
    store_codes(layout, k0, layout.group, codes, out);
  }
  return kPackOk;
}

namespace {

// A code in the steps of 32 k at p, those of its row and its place among 4 k; `s` is the number of these 4 k.
int stored_code(int bits, const uint8_t* p, int64_t s) {
  if (bits == 8) return p[64 * s];
  const bool nibbles = bits >= 4;
  const int low = nibbles ? p[64 * (s / 2)] >> s % 2 * 4 & 15 : p[64 * (s / 4)] >> s % 4 * 2 & 3;
  const uint8_t* high = p + 64 * (nibbles ? 4 : 2);
  if (bits == 6) return low | (high[64 * (s / 4)] >> s % 4 * 2 & 3) << 4;
  if (bits % 2 == 0) return low;
  return low | (high[0] >> s & 1) << (nibbles ? 4 : 2);
}

// Decodes a value of the formats that only keep the values of checkpoints.
float kept_value(const Layout& layout, const uint8_t* w, int64_t r, int64_t k) {
  const Traits& t = kTraits[layout.format];
  if (t.scale == Scale::kRows) {
    float scale;
    memcpy(&scale, w + layout.scale_offset + 4 * r, 4);
    return e4m3_to_float(w[k / 4 * 64 + r * 4 + k % 4]) * scale;
  }
  const uint8_t* steps = w + k / kActGroup * 64 * t.bits + r * 4 + k % 4;
  const int code = stored_code(t.bits, steps, k % kActGroup / 4);
  const Table& table = table_of(layout.format);
  int number = (t.table ? table.codes[code] : code) - t.zero;
  const int64_t g = k / layout.group;
  const uint8_t *scale = w + layout.scale_offset, *beside = w + layout.min_offset;
  auto half_at = [](const uint8_t* at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return half_to_float(half);
  };
  if (!has_super(t)) {
    const float s = half_at(scale + 2 * (g * kRows + r));
    if (t.beside == Beside::kZeros) number -= beside[g * kRows + r];
    const float value = static_cast<float>(number) * s;
    return t.beside == Beside::kMinima ? value + half_at(beside + 2 * (g * kRows + r)) : value;
  }
  const uint8_t *integers = scale + g * numbers(t) * kRows + r,
                *super = beside + 2 * (k / kSuperGroup * numbers(t) * kRows + r);
  const int of_group = t.scale == Scale::kSigned ? static_cast<int8_t>(*integers) : *integers;
  const float d = half_at(super) * (t.table ? table.factor : 1.0f);
  const float value = static_cast<float>(number) * (d * static_cast<float>(of_group));
  if (t.beside == Beside::kSuper) return value;
  return value - half_at(super + 2 * kRows) * static_cast<float>(integers[kRows]);
}

}  // namespace

void unpack_block(const Layout& layout, int64_t block, const uint8_t* w, float* out, int64_t ld) {
  const int64_t rows = layout.n - block * kRows < kRows ? layout.n - block * kRows : kRows;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(w + layout.scale_offset);
  const uint16_t* minima = reinterpret_cast<const uint16_t*>(w + layout.min_offset);
  out += block * kRows * ld;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < layout.k; k++) {
      float* to = out + r * ld + k;
      if (layout.format == kF32) {
        memcpy(to, w + k * 64 + r * 4, 4);
      } else if (layout.format > kNvfp4) {
        *to = kept_value(layout, w, r, k);
      } else if (layout.format == kBf16) {
        uint16_t value;
        memcpy(&value, w + k / 2 * 64 + r * 4 + k % 2 * 2, 2);
        *to = bf16_to_float(value);
      } else if (layout.format == kFp8) {
        float scale;
        memcpy(&scale, w + layout.scale_offset + k / layout.group * 4, 4);
        *to = e4m3_to_float(w[k / 4 * 64 + r * 4 + k % 4]) * scale;
      } else if (small_float(layout)) {
        const uint8_t byte = w[layout.scale_offset + k / layout.group * kRows + r];
        float scale = e8m0_to_float(byte);
        if (layout.format == kNvfp4) {
          memcpy(&scale, w + layout.min_offset, 4);
          scale *= e4m3_to_float(byte);
        }
        *to = e2m1_to_float(w[k / 8 * 64 + r * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15) * scale;
      } else {
        const int64_t at = k / layout.group * kRows + r;
        const float scale = half_to_float(scales[at]);
        if (layout.format == kInt8) {
          *to = static_cast<float>(w[k / 4 * 64 + r * 4 + k % 4] - 128) * scale;
          continue;
        }
        const int code = w[k / 8 * 64 + r * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
        // The product of a code and an fp16 scale is exact, so that only the addition rounds.
        *to = layout.format == kInt4 ? static_cast<float>(code - 8) * scale
                                     : static_cast<float>(code) * scale + half_to_float(minima[at]);
      }
    }
}

}  // namespace hetero
