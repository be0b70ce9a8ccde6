// Packing of weights into blocks of 16 rows, and back. The arithmetic is float32, one operation at a time in
// a fixed order, so that hetero/quant/pack.py reproduces every bit.
#include "pack.h"

#include <string.h>

// The loops over 16 rows are compiled for several instruction sets and chosen by the loader; contraction is
// off, so that the results do not depend on the choice.
#define HETERO_CLONES __attribute__((target_clones("default", "avx2", "avx512f"), optimize("O3")))

namespace hetero {
namespace {

constexpr int kRows = kBlockRows;
constexpr int kMaxGroup = 128;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: rounds to an integer, ties to even
constexpr float kHalfMax = 65504.0f;
// Scales tried for int4: the signed maximum divided by these. The first is the plain one; another is taken
// where its squared error is smaller.
constexpr int kCandidates = 7;
constexpr float kDivisors[kCandidates] = {-8.0f, -8.5f, -7.2f, -8.2f, -7.8f, -8.9f, -9.4f};

inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

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
  if (layout.format == kInt8) {
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

void store_padding(const Layout& layout, uint8_t* out) {
  const int64_t groups = layout.group ? layout.k_pad / layout.group : 0;
  const int64_t end = (layout.format == kInt4a ? layout.min_offset : layout.scale_offset) + groups * 32;
  memset(out + end, 0, static_cast<size_t>(layout.block_bytes - end));
}

}  // namespace

bool make_layout(int32_t format, int32_t group, int64_t n, int64_t k, Layout* layout) {
  const bool plain = format == kF32 || format == kBf16;
  if (format < 0 || format >= kFormats || n < 1 || k < 1) return false;
  if (plain ? group != 0 : group != 32 && group != 64 && group != 128) return false;
  const int64_t unit = plain ? kActGroup : group;
  layout->format = format;
  layout->group = group;
  layout->n = n;
  layout->k = k;
  layout->n_pad = (n + kRows - 1) / kRows * kRows;
  layout->k_pad = (k + unit - 1) / unit * unit;
  const int64_t per_step[kFormats] = {1, 2, 4, 8, 8};
  const int64_t codes = layout->k_pad / per_step[format] * 64;
  const int64_t scales = plain ? 0 : layout->k_pad / group * kRows * 2;
  layout->scale_offset = codes;
  layout->min_offset = codes + scales;
  layout->block_bytes = (codes + scales * (format == kInt4a ? 2 : 1) + 63) / 64 * 64;
  return true;
}

int64_t expert_bytes(const Layout& up, const Layout& down, bool has_gate, bool has_bias) {
  int64_t bytes = packed_bytes(up) * (has_gate ? 2 : 1) + packed_bytes(down);
  if (has_bias) bytes += 4 * (up.n * (has_gate ? 2 : 1) + down.n);
  return (bytes + 63) / 64 * 64;
}

PackStatus pack_block(const Layout& layout, int64_t block, const Source& source, uint8_t* out) {
  const int64_t row = block * kRows;
  if (layout.group == 0) return pack_floats(layout, row, source, out);
  Group group;
  uint8_t codes[kMaxGroup][kRows];
  uint16_t* scale = reinterpret_cast<uint16_t*>(out + layout.scale_offset);
  uint16_t* minimum = reinterpret_cast<uint16_t*>(out + layout.min_offset);
  store_padding(layout, out);
  for (int64_t k0 = 0; k0 < layout.k_pad; k0 += layout.group, scale += kRows, minimum += kRows) {
    const int64_t real = layout.k - k0 < layout.group ? layout.k - k0 : layout.group;
    load_group(layout, source, row, k0, layout.group, &group);
    if (!all_finite(group, real)) return kPackNotFinite;
    const PackStatus status = quantise_group(layout, group, layout.group, real, scale, minimum, codes);
    if (status != kPackOk) return status;
    store_codes(layout, k0, layout.group, codes, out);
  }
  return kPackOk;
}

void pack_codes_block(const Layout& layout, int64_t block, const uint8_t* codes, const uint16_t* scales,
                      const uint16_t* minima, uint8_t* out) {
  const int64_t row = block * kRows, groups = layout.k_pad / layout.group;
  const uint8_t zero = layout.format == kInt8 ? 128 : layout.format == kInt4 ? 8 : 0;
  uint8_t part[kMaxGroup][kRows];
  uint16_t* scale = reinterpret_cast<uint16_t*>(out + layout.scale_offset);
  uint16_t* minimum = reinterpret_cast<uint16_t*>(out + layout.min_offset);
  store_padding(layout, out);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t k0 = g * layout.group;
    for (int64_t r = 0; r < kRows; r++) {
      const bool inside = row + r < layout.n;
      scale[g * kRows + r] = inside ? scales[(row + r) * groups + g] : 0;
      if (layout.format == kInt4a) minimum[g * kRows + r] = inside ? minima[(row + r) * groups + g] : 0;
      for (int64_t i = 0; i < layout.group; i++)
        part[i][r] = inside && k0 + i < layout.k ? codes[(row + r) * layout.k + k0 + i] : zero;
    }
    store_codes(layout, k0, layout.group, part, out);
  }
}

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
      } else if (layout.format == kBf16) {
        uint16_t value;
        memcpy(&value, w + k / 2 * 64 + r * 4 + k % 2 * 2, 2);
        *to = bf16_to_float(value);
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
