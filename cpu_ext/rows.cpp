#include "rows.h"

#include <cstring>

namespace hetero {
namespace {

float f16_to_f32(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | mantissa << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

}  // namespace

void widen(const void* src, DType type, int64_t n, int64_t stride, float* dst) {
  if (type == DType::kF32) {
    const float* s = static_cast<const float*>(src);
    if (stride == 1) {
      std::memcpy(dst, s, static_cast<size_t>(n) * 4);
    } else {
      for (int64_t i = 0; i < n; ++i) dst[i] = s[i * stride];
    }
    return;
  }
  const uint16_t* s = static_cast<const uint16_t*>(src);
  for (int64_t i = 0; i < n; ++i) {
    if (type == DType::kBf16) {
      const uint32_t bits = static_cast<uint32_t>(s[i * stride]) << 16;
      std::memcpy(dst + i, &bits, 4);
    } else {
      dst[i] = f16_to_f32(s[i * stride]);
    }
  }
}

void widen_in_order(const void* src, DType type, const int32_t* order, int64_t n, float* dst) {
  const float* floats = static_cast<const float*>(src);
  const uint16_t* halves = static_cast<const uint16_t*>(src);
  for (int64_t i = 0; i < n; ++i) {
    if (type == DType::kF32) {
      dst[i] = floats[order[i]];
    } else if (type == DType::kBf16) {
      const uint32_t bits = static_cast<uint32_t>(halves[order[i]]) << 16;
      std::memcpy(dst + i, &bits, 4);
    } else {
      dst[i] = f16_to_f32(halves[order[i]]);
    }
  }
}

size_t RowStore::bytes(RowForm form, int64_t rows, int64_t k_pad) {
  const size_t n = static_cast<size_t>(rows), k = static_cast<size_t>(k_pad);
  size_t total = 0;
  if (form.codes) total += align64(n * k) + 2 * align64(n * (k / kActGroup) * 4);
  if (form.floats) total += align64(n * k * 4);
  if (form.halves) total += align64(n * k * 2);
  return total;
}

RowStore RowStore::carve(uint8_t** cursor, RowForm form, int64_t rows, int64_t k_pad) {
  RowStore s;
  s.k_pad = k_pad;
  const size_t n = static_cast<size_t>(rows), k = static_cast<size_t>(k_pad);
  auto take = [&](size_t bytes) {
    uint8_t* p = *cursor;
    *cursor += align64(bytes);
    return p;
  };
  if (form.codes) {
    s.q = reinterpret_cast<int8_t*>(take(n * k));
    s.scale = reinterpret_cast<float*>(take(n * (k / kActGroup) * 4));
    s.sum = reinterpret_cast<int32_t*>(take(n * (k / kActGroup) * 4));
  }
  if (form.floats) s.f32 = reinterpret_cast<float*>(take(n * k * 4));
  if (form.halves) s.bf16 = reinterpret_cast<uint16_t*>(take(n * k * 2));
  return s;
}

Rows RowStore::at(int64_t row, int64_t rows) const {
  const int64_t groups = k_pad / kActGroup;
  Rows r = {};
  r.rows = rows;
  if (q != nullptr) {
    r.q = q + row * k_pad;
    r.scale = scale + row * groups;
    r.sum = sum + row * groups;
  }
  if (f32 != nullptr) r.f32 = f32 + row * k_pad;
  if (bf16 != nullptr) r.bf16 = bf16 + row * k_pad;
  return r;
}

}  // namespace hetero
