// Quantising a group of 16 rows: scales, and codes of bytes by k and row. Compiled for several instruction
// sets with the same results, see pack_sizes.h.
#pragma once

#include "pack_group.h"

namespace hetero {
namespace {

constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: rounds to an integer, ties to even
constexpr float kHalfMax = 65504.0f;
// Scales tried for int4: the signed maximum divided by these. The first is the plain one; another is taken
// where its squared error is smaller.
constexpr int kCandidates = 7;
constexpr float kDivisors[kCandidates] = {-8.0f, -8.5f, -7.2f, -8.2f, -7.8f, -8.9f, -9.4f};

template <int Bytes>
HETERO_INLINE bool all_finite_by(const Group& group, int64_t size) {
  HETERO_VECTORS(Bytes);
  Bits bad = {};
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r += kLanes) {
      // An exponent of ones alone carries into the bit above it.
      bad |= (load_as<Bits>(group.v[i] + r) & 0x7fffffffu) + 0x00800000u;
    }
  uint32_t any = 0;
  for (int r = 0; r < kLanes; r++) any |= bad[r];
  return any < 0x80000000u;
}
HETERO_VERSIONS(bool, all_finite, (const Group& group, int64_t size), (group, size))

// The value of largest magnitude of each row, the first of equals.
template <int Bytes>
HETERO_INLINE void signed_maximum_by(const Group& group, int64_t size, float* best) {
  HETERO_VECTORS(Bytes);
  const int64_t half = size / 2;
  for (int r = 0; r < kRows; r += kLanes) {
    Floats first = {}, second = {};
    Ints most = {}, later = {};  // magnitudes, in the order of their bits
    auto take = [&](int64_t i, Floats* so_far, Ints* magnitude) __attribute__((always_inline)) {
      const Floats value = load_as<Floats>(group.v[i] + r);
      const Ints mine = (Ints)value & 0x7fffffff;
      *so_far = mine > *magnitude ? value : *so_far;
      *magnitude = mine > *magnitude ? mine : *magnitude;
    };
    for (int64_t i = 0; i < half; i++) {
      take(i, &first, &most);
      take(half + i, &second, &later);
    }
    for (int64_t i = 2 * half; i < size; i++) take(i, &second, &later);
    store_as(best + r, later > most ? second : first);
  }
}
HETERO_VERSIONS(void, signed_maximum, (const Group& group, int64_t size, float* best), (group, size, best))

template <int Bytes>
HETERO_INLINE void extremes_by(const Group& group, int64_t size, float* low, float* high) {
  HETERO_VECTORS(Bytes);
  for (int r = 0; r < kRows; r += kLanes) {
    Floats least = load_as<Floats>(group.v[0] + r), most = least;
    for (int64_t i = 1; i < size; i++) {
      const Floats x = load_as<Floats>(group.v[i] + r);
      least = x < least ? x : least;
      most = x > most ? x : most;
    }
    store_as(low + r, least);
    store_as(high + r, most);
  }
}
HETERO_VERSIONS(void, extremes, (const Group& group, int64_t size, float* low, float* high),
                (group, size, low, high))

template <int Bytes>
HETERO_INLINE void largest_by(const Group& group, int64_t size, float* most) {
  HETERO_VECTORS(Bytes);
  const int64_t half = size / 2;
  for (int r = 0; r < kRows; r += kLanes) {
    Ints first = {}, second = {};  // magnitudes, in the order of their bits
    for (int64_t i = 0; i < half; i++) {
      const Ints a = load_as<Ints>(group.v[i] + r) & 0x7fffffff;
      const Ints b = load_as<Ints>(group.v[half + i] + r) & 0x7fffffff;
      first = a > first ? a : first;
      second = b > second ? b : second;
    }
    store_as(most + r, second > first ? second : first);
  }
}
HETERO_VERSIONS(void, largest, (const Group& group, int64_t size, float* most), (group, size, most))

// fp16 scale, its float32 value and the reciprocal (0 for 0).
template <int Bytes>
HETERO_INLINE void round_scale_by(const float* scale, uint16_t* half, float* value, float* inverse) {
  HETERO_VECTORS(Bytes);
  for (int r = 0; r < kRows; r += kLanes) {
    const Bits rounded = to_half<Bytes>(load_as<Floats>(scale + r));
    const Floats found = from_half<Bytes>(rounded);
    store_as(half + r, __builtin_convertvector(rounded, Halves));
    store_as(value + r, found);
    store_as(inverse + r, found == 0.0f ? Floats{} : 1.0f / found);
  }
}
HETERO_VERSIONS(void, round_scale, (const float* scale, uint16_t* half, float* value, float* inverse),
                (scale, half, value, inverse))

// The best of some scales of int4 for a group: scale[r] as fp16 and its reciprocal, of each row the one with
// the smallest squared error, the first of equals. They are the row's number of largest magnitude over
// kDivisors; one beyond fp16 is not taken. Codes are rounded against it, differences squared and added in
// order. False where the first scale is beyond fp16.
template <int Bytes>
HETERO_INLINE bool best_scale_by(const Group& group, int64_t size, const float* most, uint16_t* scale,
                                 float* inverse) {
  HETERO_VECTORS(Bytes);
  for (int r = 0; r < kRows; r += kLanes) {
    Floats value[kCandidates], by[kCandidates], total[kCandidates];
    Bits half[kCandidates];
    for (int c = 0; c < kCandidates; c++) {
      const Floats exact = load_as<Floats>(most + r) / kDivisors[c] + 0.0f;  // no negative zero
      const Ints beyond = (Ints)((Bits)exact & 0x7fffffffu) > static_cast<int32_t>(float_to_bits(kHalfMax));
      for (int lane = 0; lane < kLanes && c == 0; lane++)
        if (beyond[lane] != 0) return false;
      half[c] = to_half<Bytes>(exact);
      const Floats found = from_half<Bytes>(half[c]);
      // No error is smaller with an infinite one.
      value[c] = (Floats)(((Bits)found & ~(Bits)beyond) | ((Bits)beyond & 0x7f800000u));
      by[c] = found == 0.0f ? Floats{} : 1.0f / found;
      total[c] = Floats{};
    }
    for (int64_t i = 0; i < size; i++) {
      const Floats x = load_as<Floats>(group.v[i] + r);
      for (int c = 0; c < kCandidates; c++) {
        Floats scaled = x * by[c];
        scaled = scaled > -8.0f ? scaled : Floats{} - 8.0f;
        scaled = scaled < 7.0f ? scaled : Floats{} + 7.0f;
        const Floats difference = x - ((scaled + kRoundMagic) - kRoundMagic) * value[c];
        total[c] += difference * difference;
      }
    }
    Bits best = half[0];
    Floats best_by = by[0], least = total[0];
    for (int c = 1; c < kCandidates; c++) {
      best = total[c] < least ? half[c] : best;
      best_by = total[c] < least ? by[c] : best_by;
      least = total[c] < least ? total[c] : least;
    }
    store_as(scale + r, __builtin_convertvector(best, Halves));
    store_as(inverse + r, best_by);
  }
  return true;
}
HETERO_VERSIONS(bool, best_scale,
                (const Group& group, int64_t size, const float* most, uint16_t* scale, float* inverse),
                (group, size, most, scale, inverse))

// codes[i][r] = round((v - offset) * inverse), clamped, plus zero
template <int Bytes>
HETERO_INLINE void round_codes_by(const Group& group, int64_t size, const float* inverse, const float* offset,
                                  float low, float high, int zero, uint8_t (*codes)[kRows]) {
  HETERO_VECTORS(Bytes);
  for (int r = 0; r < kRows; r += kLanes) {
    const Floats by = load_as<Floats>(inverse + r), less = load_as<Floats>(offset + r);
    for (int64_t i = 0; i < size; i++) {
      Floats scaled = (load_as<Floats>(group.v[i] + r) - less) * by;
      scaled = scaled < low ? Floats{} + low : scaled;
      scaled = scaled > high ? Floats{} + high : scaled;
      // The sum's last bits are the integer.
      const Bits code = (Bits)(scaled + kRoundMagic) + static_cast<uint32_t>(zero);
      store_as(codes[i] + r, __builtin_convertvector(code, Octets));
    }
  }
}
HETERO_VERSIONS(void, round_codes,
                (const Group& group, int64_t size, const float* inverse, const float* offset, float low,
                 float high, int zero, uint8_t (*codes)[kRows]),
                (group, size, inverse, offset, low, high, zero, codes))

// To nearest, ties to even; beyond 448 the largest. A zero keeps its sign.
template <int Bytes>
HETERO_INLINE void round_e4m3_by(const Group& group, int64_t size, float inverse, uint8_t (*codes)[kRows]) {
  HETERO_VECTORS(Bytes);
  for (int64_t i = 0; i < size; i++)
    for (int r = 0; r < kRows; r += kLanes) {
      const Bits code = to_e4m3<Bytes>(load_as<Floats>(group.v[i] + r) * inverse);
      store_as(codes[i] + r, __builtin_convertvector(code, Octets));
    }
}
HETERO_VERSIONS(void, round_e4m3, (const Group& group, int64_t size, float inverse, uint8_t (*codes)[kRows]),
                (group, size, inverse, codes))

// To nearest, ties to the even code; beyond 6 the largest. Zero has no sign.
template <int Bytes>
HETERO_INLINE void round_e2m1_by(const Group& group, int64_t size, const float* inverse,
                                 uint8_t (*codes)[kRows]) {
  HETERO_VECTORS(Bytes);
  const Bits limit = Bits{} + float_to_bits(kMostE2m1);
  for (int r = 0; r < kRows; r += kLanes) {
    const Floats by = load_as<Floats>(inverse + r);
    for (int64_t i = 0; i < size; i++) {
      const Bits bits = (Bits)(load_as<Floats>(group.v[i] + r) * by), rest = bits & 0x7fffffffu;
      const Bits bounded = (Ints)rest < (Ints)limit ? rest : limit;
      // The numbers below 1 are multiples of 0.5; adding 2^22 rounds to one.
      const Bits subnormal = (Bits)((Floats)bounded + 0x1p22f) - float_to_bits(0x1p22f);
      const Bits normal = ((bounded + 0x1fffffu + (bounded >> 22 & 1u)) >> 22) - (126u << 1);
      const Bits code = (Ints)bounded < (127 << 23) ? subnormal : normal;
      store_as(codes[i] + r, __builtin_convertvector(code | ((bits >> 28) & (code + 7u) & 8u), Octets));
    }
  }
}
HETERO_VERSIONS(void, round_e2m1,
                (const Group& group, int64_t size, const float* inverse, uint8_t (*codes)[kRows]),
                (group, size, inverse, codes))

// Scales of mxfp4 for the largest numbers of a group, and their reciprocals.
template <int Bytes>
HETERO_INLINE void e8m0_scales_by(const float* most, uint8_t* scale, float* inverse) {
  HETERO_VECTORS(Bytes);
  for (int r = 0; r < kRows; r += kLanes) {
    const Ints largest = load_as<Ints>(most + r);
    // Of the largest's exponent 2 is the number's own, whose largest is 6 = 1.5 * 2^2. Zeros get 2^0.
    const Ints exponent = largest >> 23;
    const Ints lower = exponent > 2 ? exponent - 2 : Ints{};
    const Bits e = (Bits)(largest == 0 ? Ints{} + 127 : lower);
    store_as(scale + r, __builtin_convertvector(e, Octets));
    store_as(inverse + r, (254u - e) << 23);
  }
}
HETERO_VERSIONS(void, e8m0_scales, (const float* most, uint8_t* scale, float* inverse),
                (most, scale, inverse))

// Scales of nvfp4 beside the matrix's, not 0, likewise.
template <int Bytes>
HETERO_INLINE void e4m3_scales_by(const float* most, float shared, uint8_t* scale, float* inverse) {
  HETERO_VECTORS(Bytes);
  for (int r = 0; r < kRows; r += kLanes) {
    const Bits code = to_e4m3<Bytes>(load_as<Floats>(most + r) / kMostE2m1 / shared);
    const Floats value = from_half<Bytes>((code & 0x80u) << 8 | (code & 0x7fu) << 7) * 256.0f * shared;
    store_as(scale + r, __builtin_convertvector(code, Octets));
    store_as(inverse + r, value == 0.0f ? Floats{} : 1.0f / value);
  }
}
HETERO_VERSIONS(void, e4m3_scales, (const float* most, float shared, uint8_t* scale, float* inverse),
                (most, shared, scale, inverse))

}  // namespace
}  // namespace hetero
