// Activations, input quantisation and the weighted sum, written once over a vector policy (see exact.h), with
// the same operations in the same order on every instruction set, so that their bits agree.
#pragma once

#include <string.h>

#include "kernels.h"

namespace hetero {
namespace {

constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// e^x: relative error below 2e-7; infinite above 88.72, zero below -87.33 (no subnormal results); NaN stays.
template <class P>
inline typename P::F exp_of(typename P::F x) {
  using F = typename P::F;
  const F high = P::set1(88.72283f), low = P::set1(-87.33654f);
  const F bounded = P::min(high, P::max(low, x));  // the second operand where unordered, so NaN stays
  const F shifted = P::fma(bounded, P::set1(1.44269504f), P::set1(kRoundMagic));
  const F n = P::sub(shifted, P::set1(kRoundMagic));
  F r = P::fma(n, P::set1(-0.693359375f), bounded);  // ln 2 in two parts; n times the first is exact
  r = P::fma(n, P::set1(2.12194440e-4f), r);
  F p = P::set1(1.0f / 5040.0f);
  p = P::fma(p, r, P::set1(1.0f / 720.0f));
  p = P::fma(p, r, P::set1(1.0f / 120.0f));
  p = P::fma(p, r, P::set1(1.0f / 24.0f));
  p = P::fma(p, r, P::set1(1.0f / 6.0f));
  p = P::fma(p, r, P::set1(0.5f));
  p = P::fma(p, r, P::set1(1.0f));
  p = P::fma(p, r, P::set1(1.0f));
  // 2^n as a product of two, since 2^128 is no float32.
  const typename P::I whole = P::subi(P::bits(shifted), P::bits(P::set1(kRoundMagic)));
  const typename P::I first = P::half_down(whole), second = P::subi(whole, first);
  const typename P::I bias = P::set1i(127);
  p = P::mul(p, P::from_bits(P::shift_to_exponent(P::addi(first, bias))));
  p = P::mul(p, P::from_bits(P::shift_to_exponent(P::addi(second, bias))));
  p = P::where_greater(x, high, P::set1(__builtin_inff()), p);
  return P::where_greater(low, x, P::zero(), p);
}

// x / (1 + e^-t)
template <class P>
inline typename P::F times_sigmoid(typename P::F x, typename P::F t) {
  return P::div(x, P::add(P::set1(1.0f), exp_of<P>(P::sub(P::zero(), t))));
}

// x Phi(x), by erfc(z) = e^(-z^2) t Q(t) with z = |x| / sqrt 2 and t = 1 / (1 + z / 2): no cancellation for
// negative x.
template <class P>
inline typename P::F gelu_of(typename P::F x) {
  using F = typename P::F;
  const F z = P::mul(P::abs(x), P::set1(0.70710678f));
  const F t = P::div(P::set1(1.0f), P::fma(P::set1(0.5f), z, P::set1(1.0f)));
  F q = P::set1(-0.0298964623f);
  q = P::fma(q, t, P::set1(0.22431314f));
  q = P::fma(q, t, P::set1(-0.717267931f));
  q = P::fma(q, t, P::set1(1.23761392f));
  q = P::fma(q, t, P::set1(-1.18990695f));
  q = P::fma(q, t, P::set1(0.619012296f));
  q = P::fma(q, t, P::set1(-0.279133618f));
  q = P::fma(q, t, P::set1(0.161029175f));
  q = P::fma(q, t, P::set1(0.16150023f));
  q = P::fma(q, t, P::set1(0.248676464f));
  q = P::fma(q, t, P::set1(0.281960607f));
  q = P::fma(q, t, P::set1(0.282099128f));
  const F square = P::mul(x, x);
  // What the rounded square lost; the maximum turns NaN (from an infinite x) and minus infinity into a
  // number.
  const F rest = P::max(P::fma(x, x, P::sub(P::zero(), square)), P::set1(-1e30f));
  F e = exp_of<P>(P::mul(P::set1(-0.5f), square));
  e = P::fma(P::mul(P::set1(-0.5f), rest), e, e);
  const F tail = P::mul(P::set1(0.5f), P::mul(P::mul(t, q), e));  // Phi(-|x|)
  const F phi = P::where_greater(x, P::zero(), P::sub(P::set1(1.0f), tail), tail);
  return P::mul(x, phi);
}

template <class P, int Kind>
inline typename P::F act_of(typename P::F g, float alpha) {
  using F = typename P::F;
  if (Kind == kSilu) return times_sigmoid<P>(g, P::mul(P::set1(alpha), g));
  if (Kind == kGelu) return gelu_of<P>(g);
  if (Kind == kGeluTanh) {  // (1 + tanh u) / 2 = 1 / (1 + e^-2u)
    const F cubic = P::mul(P::mul(g, g), g);
    const F u = P::mul(P::set1(1.59576912f), P::fma(P::set1(0.044715f), cubic, g));
    return times_sigmoid<P>(g, u);
  }
  const F positive = P::max(P::zero(), g);
  if (Kind == kRelu) return positive;
  if (Kind == kRelu2) return P::mul(positive, positive);
  return g;
}

template <class P, int Kind>
inline void act_lanes(const float* gate, const float* up, float* h, const Act* act) {
  using F = typename P::F;
  F u = P::load(up);
  if (!act->has_gate) return P::store(h, act_of<P, Kind>(u, act->alpha));
  const F g = P::min(P::set1(act->gate_max), P::load(gate));
  u = P::max(P::set1(-act->up_limit), P::min(P::set1(act->up_limit), u));
  const F value = P::min(P::set1(act->act_max), act_of<P, Kind>(g, act->alpha));
  P::store(h, P::mul(value, P::add(u, P::set1(act->up_offset))));
}

template <class P, int Kind>
inline void act_loop(const float* gate, const float* up, float* h, int64_t n, const Act* act) {
  int64_t i = 0;
  for (; i + P::kLanes <= n; i += P::kLanes) act_lanes<P, Kind>(gate + i, up + i, h + i, act);
  if (i == n) return;
  float g[16] = {0}, u[16] = {0}, out[16];
  const size_t bytes = static_cast<size_t>(n - i) * sizeof(float);
  if (act->has_gate) memcpy(g, gate + i, bytes);
  memcpy(u, up + i, bytes);
  act_lanes<P, Kind>(g, u, out, act);
  memcpy(h + i, out, bytes);
}

template <class P>
void act_kernel(const float* gate, const float* up, float* h, int64_t n, const Act* act) {
  switch (act->kind) {
    case kSilu:
      return act_loop<P, kSilu>(gate, up, h, n, act);
    case kGelu:
      return act_loop<P, kGelu>(gate, up, h, n, act);
    case kGeluTanh:
      return act_loop<P, kGeluTanh>(gate, up, h, n, act);
    case kRelu:
      return act_loop<P, kRelu>(gate, up, h, n, act);
    case kRelu2:
      return act_loop<P, kRelu2>(gate, up, h, n, act);
    default:
      return act_loop<P, kIdentity>(gate, up, h, n, act);
  }
}

// P::amax_bits(p): the largest of the bit patterns of |p[0..32)| as integers: the amax, or at least
// 0x7f800000 where one is not finite. P::codes(p, inverse, q): rint(p[i] * inverse) into q[0..32), returns
// their sum.
template <class P>
void quantize_kernel(const float* x, int64_t k, int64_t k_pad, int8_t* q, float* scale, int32_t* sum) {
  for (int64_t k0 = 0; k0 < k_pad; k0 += kActGroup, x += kActGroup, q += kActGroup, scale++, sum++) {
    float padded[kActGroup];
    const float* values = x;
    if (k0 + kActGroup > k) {
      const int64_t left = k > k0 ? k - k0 : 0;
      memset(padded, 0, sizeof padded);
      if (left > 0) memcpy(padded, x, static_cast<size_t>(left) * sizeof(float));
      values = padded;
    }
    const int32_t bits = P::amax_bits(values);
    float amax;
    memcpy(&amax, &bits, 4);
    const bool finite = bits < 0x7f800000;
    if (!finite || amax < kTinyAmax) {
      memset(q, 0, kActGroup);
      *scale = finite ? 0.0f : __builtin_nanf("");
      *sum = 0;
      continue;
    }
    *scale = amax / 127.0f;
    *sum = P::codes(values, 127.0f / amax, q);
  }
}

template <class P>
void axpy_kernel(float weight, const float* y, float* out, int64_t n) {
  const typename P::F w = P::set1(weight);
  int64_t i = 0;
  for (; i + P::kLanes <= n; i += P::kLanes) P::store(out + i, P::fma(w, P::load(y + i), P::load(out + i)));
  for (; i < n; i++) out[i] = __builtin_fmaf(weight, y[i], out[i]);
}

// The same bits everywhere; compilers turn the loop into vectors.
inline void round_kernel(const float* x, int64_t k, int64_t k_pad, uint16_t* out) {
  for (int64_t i = 0; i < k; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 64u;
    out[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
  memset(out + k, 0, static_cast<size_t>(k_pad - k) * 2);
}

}  // namespace
}  // namespace hetero
