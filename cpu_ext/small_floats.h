// Small floats one at a time. In an anonymous namespace, so that every unit has its own copies.
#pragma once

#include "bits.h"

namespace hetero {
namespace {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f;
  const uint32_t normal = (rest << 13) + (112u << 23);
  const uint32_t special = (rest << 13) + (224u << 23);
  const uint32_t value = rest < 0x400u ? float_to_bits(subnormal) : rest < 0x7c00u ? normal : special;
  return bits_to_float(sign | value);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float bf16_to_float(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

inline float e4m3_to_float(uint8_t code) {
  return half_to_float(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

}  // namespace
}  // namespace hetero
