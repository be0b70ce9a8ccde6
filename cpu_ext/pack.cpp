// Packing of weights into blocks of 16 rows. The arithmetic is float32, one operation at a time in
// a fixed order, so that hetero/quant/pack.py reproduces every bit.
#include "pack.h"

#include <emmintrin.h>
#include <string.h>

#include <algorithm>

#include "pack_round.h"

namespace hetero {
namespace {

constexpr int64_t kMaxK = 1 << 19;  // the scratch of a kernel holds what it needs of one row
constexpr int64_t kTileBlocks = 8;  // blocks that share the scales of fp8: 128 rows
// Four lines of 16 bytes, one of each k, to 16 rows of four bytes.
inline void store_lines(__m128i a, __m128i b, __m128i c, __m128i d, uint8_t* out) {
  const __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d);
  const __m128i ab2 = _mm_unpackhi_epi8(a, b), cd2 = _mm_unpackhi_epi8(c, d);
  auto put = [&](int i, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + i, v); };
  put(0, _mm_unpacklo_epi16(ab, cd));
  put(1, _mm_unpackhi_epi16(ab, cd));
  put(2, _mm_unpacklo_epi16(ab2, cd2));
  put(3, _mm_unpackhi_epi16(ab2, cd2));
}

// Codes of `size` k (a multiple of 8) of 16 rows into the steps of the block.
void store_codes(const Layout& layout, int64_t k0, int64_t size, const uint8_t (*codes)[kRows],
                 uint8_t* out) {
  auto line = [&](int64_t i) { return _mm_load_si128(reinterpret_cast<const __m128i*>(codes[i])); };
  if (kTraits[layout.format].bits == 8) {
    uint8_t* p = out + k0 / 4 * 64;
    for (int64_t i = 0; i < size; i += 4, p += 64)
      store_lines(line(i), line(i + 1), line(i + 2), line(i + 3), p);
    return;
  }
  uint8_t* p = out + k0 / 8 * 64;
  // Codes are below 16, so that a shift by words is one by bytes.
  auto both = [&](int64_t i) { return _mm_or_si128(line(i), _mm_slli_epi16(line(i + 4), 4)); };
  for (int64_t i = 0; i < size; i += 8, p += 64)
    store_lines(both(i), both(i + 1), both(i + 2), both(i + 3), p);
}

// Numbers of bf16 in words of two, as they are. False where one is NaN or infinite.
HETERO_CLONES bool bf16_finite(const uint32_t (*words)[kRows], int64_t count) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < count; i++)
    for (int r = 0; r < kRows; r++) {
      // An exponent of ones alone carries into the bit above it.
      bad |= (words[i][r] & 0x7fff7fffu) + 0x00800080u;
    }
  return (bad & 0x80008000u) == 0;
}

// To words of two numbers of bf16. False where one that is finite becomes infinite.
HETERO_CLONES bool round_bf16(const Group& group, int64_t size, uint32_t (*words)[kRows]) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < size / 2; i++)
    for (int r = 0; r < kRows; r++) {
      const uint32_t low = float_to_bf16(group.v[2 * i][r]), high = float_to_bf16(group.v[2 * i + 1][r]);
      words[i][r] = low | high << 16;
      bad |= ((low & 0x7fffu) + 0x80u) | ((high & 0x7fffu) + 0x80u);
    }
  return (bad & 0x8000u) == 0;
}

// Rows of bf16 that stay bf16 move as words, 128 k at a time.
PackStatus move_bf16(const Layout& layout, int64_t row, const Source& source, uint8_t* out) {
  alignas(64) Words words;
  const uint8_t* places[kRows];
  for (int64_t k0 = 0; k0 < layout.k; k0 += kMaxGroup) {
    const int64_t count = std::min<int64_t>(kMaxGroup, layout.k - k0);
    row_places(layout, source, row, k0, places);
    turn_words(places, count / 2, words);
    if (!bf16_finite(words, count / 2)) return kPackNotFinite;
    memcpy(out + k0 * 32, words, static_cast<size_t>(count) * 32);
  }
  return kPackOk;
}

PackStatus pack_floats(const Layout& layout, int64_t row, const Source& source, uint8_t* out) {
  if (layout.format == kBf16 && source.type == kSourceBf16 && source.col_stride == 1 &&
      layout.k == layout.k_pad)
    return move_bf16(layout, row, source, out);
  Group group;
  for (int64_t k0 = 0; k0 < layout.k_pad; k0 += kActGroup) {
    load_group(layout, source, row, k0, kActGroup, &group);
    if (!all_finite(group, kActGroup)) return kPackNotFinite;
    if (layout.format == kF32)
      memcpy(out + k0 * 64, group.v, kActGroup * 64);
    else if (!round_bf16(group, kActGroup, reinterpret_cast<uint32_t (*)[kRows]>(out + k0 * 32)))
      return kPackOverflow;
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
      minimum[r] = low[r] + 0.0f;  // no negative zero
      scale[r] = (high[r] - low[r]) / 15.0f;
      if (!(low[r] >= -kHalfMax && low[r] <= kHalfMax && scale[r] <= kHalfMax)) return kPackOverflow;
    }
    round_scale(minimum, min16, minimum, inverse);
    round_scale(scale, scale16, value, inverse);
    round_codes(group, size, inverse, minimum, 0.0f, 15.0f, 0, codes);
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
    round_codes(group, size, inverse, zeros, -127.0f, 127.0f, 128, codes);
    return kPackOk;
  }
  if (!best_scale(group, real, most, scale16, inverse)) return kPackOverflow;
  round_codes(group, size, inverse, zeros, -8.0f, 7.0f, 8, codes);
  return kPackOk;
}

// One group of 16 rows of the formats of small floats: its codes, and its scales at `scale`.
void quantise_floats(const Layout& layout, const Group& group, float shared, uint8_t* scale,
                     uint8_t (*codes)[kRows]) {
  float most[kRows], inverse[kRows] = {0};
  if (layout.format == kFp8) {
    memcpy(scale, &shared, 4);
    return round_e4m3(group, layout.group, shared == 0 ? 0 : 1.0f / shared, codes);
  }
  largest(group, layout.group, most);
  if (layout.format == kMxfp4)
    e8m0_scales(most, scale, inverse);
  else if (shared != 0)
    e4m3_scales(most, shared, scale, inverse);
  else
    memset(scale, 0, kRows);
  round_e2m1(group, layout.group, inverse, codes);
}

bool has_group(int32_t format, int32_t group) {
  if (kTraits[format].scale == Scale::kNone) return group == 0;
  if (kTraits[format].group != 0) return group == kTraits[format].group;
  return group == 32 || group == 64 || group == 128;
}

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

int64_t expert_bytes(const Layout& up, const Layout& down, bool has_gate, bool has_bias, bool ordered) {
  int64_t bytes = packed_bytes(up) * (has_gate ? 2 : 1) + packed_bytes(down);
  if (has_bias) bytes += 4 * (up.n * (has_gate ? 2 : 1) + down.n);
  if (ordered) bytes += 4 * up.k;
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
  alignas(16) uint8_t codes[kMaxGroup][kRows];
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

}  // namespace hetero
