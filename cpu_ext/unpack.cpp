// Packed blocks back to floats: the inverse of pack.cpp and pack_codes.cpp, for tests and for what computes
// in floats.
#include <string.h>

#include "codes.h"
#include "pack.h"
#include "pack_sizes.h"
#include "small_floats.h"

namespace hetero {
namespace {

constexpr float kE2m1Numbers[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
inline float e2m1_to_float(int code) { return code & 8 ? -kE2m1Numbers[code & 7] : kE2m1Numbers[code]; }

inline float e8m0_to_float(uint8_t e) {
  return bits_to_float(e == 0 ? 0x00400000u : static_cast<uint32_t>(e) << 23);
}

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
