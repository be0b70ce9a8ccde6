// A float32 as its bits. In an anonymous namespace, so that every unit has its own copy.
#pragma once

#include <stdint.h>
#include <string.h>

namespace hetero {
namespace {

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

}  // namespace
}  // namespace hetero
