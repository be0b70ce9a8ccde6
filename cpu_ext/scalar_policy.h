// The portable policy of exact.h and act.h: 16 lanes as plain arrays. Used by the scalar unit and by the
// software twin of AMX.
#pragma once

#include <string.h>

#include "bits.h"
#include "codes.h"
#include "kernels.h"

namespace hetero {
namespace {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float32
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return bits_to_float(sign | float_to_bits(value));
  }
  return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// An E4M3's bits moved into an fp16: its number * 2^-8.
inline float e4m3_to_float(uint8_t code) {
  return half_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7));
}

struct Scalar {
  static constexpr int kLanes = 16;
  static constexpr int kGemvBlocks = 1, kMaxSums = 4;
  static constexpr int kFloatRows = 2, kFloatUnits = 1;
  struct F {
    float v[16];
  };
  struct I {
    int32_t v[16];
  };
  struct W {
    uint8_t v[8][64];
  };
  using Lookup = const uint8_t*;

  template <class Op>
  static F each(Op op) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = op(i);
    return r;
  }
  static F set1(float x) {
    return each([&](int) { return x; });
  }
  static F zero() { return set1(0.0f); }
  static F load(const float* p) {
    F r;
    memcpy(r.v, p, 64);
    return r;
  }
  static void store(float* p, const F& a) { memcpy(p, a.v, 64); }
  static F add(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }
  // As minps and maxps: the second operand where they are unordered.
  static F min(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F max(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F abs(const F& a) {
    return each([&](int i) { return bits_to_float(float_to_bits(a.v[i]) & 0x7fffffffu); });
  }
  // a > b ? yes : no, lane by lane
  static F where_greater(const F& a, const F& b, const F& yes, const F& no) {
    return each([&](int i) { return a.v[i] > b.v[i] ? yes.v[i] : no.v[i]; });
  }
  static F to_float(const I& a) {
    return each([&](int i) { return static_cast<float>(a.v[i]); });
  }
  static I bits(const F& a) {
    I r;
    memcpy(r.v, a.v, 64);
    return r;
  }
  static F from_bits(const I& a) {
    F r;
    memcpy(r.v, a.v, 64);
    return r;
  }
  static I set1i(int32_t x) {
    I r;
    for (int i = 0; i < 16; i++) r.v[i] = x;
    return r;
  }
  static I addi(const I& a, const I& b) {
    I r;
    for (int i = 0; i < 16; i++)
      r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
    return r;
  }
  static I subi(const I& a, const I& b) {
    I r;
    for (int i = 0; i < 16; i++)
      r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i]));
    return r;
  }
  static I half_down(const I& a) {  // arithmetic shift right by one
    I r;
    for (int i = 0; i < 16; i++) r.v[i] = a.v[i] >> 1;
    return r;
  }
  static I shift_to_exponent(const I& a) {
    I r;
    for (int i = 0; i < 16; i++) r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << 23);
    return r;
  }

  static F half(const uint16_t* p) {
    return each([&](int i) { return half_to_float(p[i]); });
  }
  static F bf_even(const uint8_t* p) {
    return each([&](int i) {
      uint32_t pair;
      memcpy(&pair, p + 4 * i, 4);
      return bits_to_float(pair << 16);
    });
  }
  static F bf_odd(const uint8_t* p) {
    return each([&](int i) {
      uint32_t pair;
      memcpy(&pair, p + 4 * i, 4);
      return bits_to_float(pair & 0xffff0000u);
    });
  }
  static Lookup lookup(const Table& table) { return table.codes; }
  template <int Format>
  static W decode(const uint8_t* p, Lookup table) {
    W r;
    using C = Codes<Format>;
    if (C::kBytes) {
      memcpy(r.v, p, 512);
    } else if (C::kBits != 4) {
      constexpr int kLow = C::kBits >= 4 ? 4 : 2;
      const uint8_t* high = p + 64 * kLow;
      for (int s = 0; s < 8; s++)
        for (int i = 0; i < 64; i++) {
          int code = kLow == 4 ? p[64 * (s / 2) + i] >> s % 2 * 4 & 15 : p[64 * (s / 4) + i] >> s % 4 * 2 & 3;
          if (C::kBits == 6) code |= (high[64 * (s / 4) + i] >> s % 4 * 2 & 3) << 4;
          if (C::kBits % 2) code |= (high[i] >> s & 1) << kLow;
          r.v[s][i] = C::kTable ? table[code] : static_cast<uint8_t>(code);
        }
    } else {
      for (int step = 0; step < 4; step++)
        for (int i = 0; i < 64; i++) {
          const uint8_t low = p[64 * step + i] & 15, high = p[64 * step + i] >> 4;
          r.v[2 * step][i] = Codes<Format>::kTable ? table[low] : low;
          r.v[2 * step + 1][i] = Codes<Format>::kTable ? table[high] : high;
        }
    }
    return r;
  }
  template <int Format>
  static F scale(const uint8_t* p) {
    return each([&](int i) {
      switch (Codes<Format>::kOf.scale) {
        case Scale::kE8m0:
          return bits_to_float(p[i] == 0 ? 0x00400000u : static_cast<uint32_t>(p[i]) << 23) * 0.5f;
        case Scale::kE4m3:
          return e4m3_to_float(p[i]);
        case Scale::kUnsigned:
          return static_cast<float>(p[i]);
        case Scale::kSigned:
          return static_cast<float>(static_cast<int8_t>(p[i]));
        default:
          return half_to_float(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
      }
    });
  }
  static F bytes(const uint8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  static void e4m3(const uint8_t* p, F* w) {
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 4; k++)
        w[k / 2 * 2 + row / 8].v[row % 8 * 2 + k % 2] = e4m3_to_float(p[4 * row + k]);
  }
  static F pair(const float* p) {
    return each([&](int i) { return p[i % 2]; });
  }
  static F fold(const F& first, const F& second) {
    return each([&](int i) {
      const float* p = (i < 8 ? first.v : second.v) + i % 8 * 2;
      return p[0] + p[1];
    });
  }
  static void half_sums(const int8_t* a, int32_t* sums) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; i++) sums[i / 16] += a[i];
  }
  template <int Format, int First, int Count>
  static I dot(const W& w, const int8_t* a, int32_t sum) {
    I r = set1i(-Codes<Format>::kZero * sum);
    for (int step = First; step < First + Count; step++)
      for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) r.v[i] += w.v[step][4 * i + j] * a[4 * step + j];
    return r;
  }
  static void prefetch(const void*) {}
  static void prefetch_far(const void*) {}
};

}  // namespace
}  // namespace hetero
