// SPDX-License-Identifier: Apache-2.0
// The curves of activations and their slopes, for the kernels that pass over rows and for the epilogues of the grouped
// GEMM.
#pragma once
#include <type_traits>

#include "device/approx.cuh"
#include "device/element.cuh"
#include "fusible/activation_kind.h"

namespace fusible {

// kFast: by the hardware's exponential and reciprocal, right to some 2^-20, for results that are rounded to 16 bits.
template <bool kFast>
DEVICE float exponential(float x) {
  if constexpr (kFast) return ptx::exp2_approx(1.44269504f * x);
  else return expf(x);
}
// 1 / (1 + exp(-slope * x))
template <bool kFast>
DEVICE float sigmoid(float x, float slope = 1.f) {
  if constexpr (kFast) return ptx::reciprocal_approx(1.f + ptx::exp2_approx(-1.44269504f * slope * x));
  else return 1.f / (1.f + expf(-slope * x));
}

struct Point {
  float value, slope;
};

// A curve and its derivative at x; `alpha` is the slope inside silu.
template <Curve kCurve, bool kFast>
DEVICE Point evaluate(float x, float alpha) {
  if constexpr (kCurve == Curve::kSilu) {
    const float s = sigmoid<kFast>(x, alpha), value = x * s;
    return {value, fmaf(alpha * value, 1.f - s, s)};
  } else if constexpr (kCurve == Curve::kGelu) {
    const float cdf = 0.5f * (1.f + erff(x * 0.70710678f));
    return {x * cdf, cdf + x * 0.39894228f * exponential<kFast>(-0.5f * x * x)};
  } else if constexpr (kCurve == Curve::kGeluTanh) {  // (1 + tanh(u / 2)) / 2 is sigmoid(u)
    const float s = sigmoid<kFast>(x + 0.044715f * x * x * x, 1.59576912f);
    return {x * s, s + x * s * (1.f - s) * 1.59576912f * (1.f + 0.134145f * x * x)};
  } else if constexpr (kCurve == Curve::kRelu) {
    return {x < 0.f ? 0.f : x, x > 0.f ? 1.f : 0.f};
  } else if constexpr (kCurve == Curve::kReluSquared) {
    return x < 0.f ? Point{0.f, 0.f} : Point{x * x, 2.f * x};
  } else {
    const float s = sigmoid<kFast>(x);
    return {s, s * (1.f - s)};
  }
}

// A kind of activation as a type. Not limited: without a limit and an offset, which cost a third of the work.
template <Curve kCurveValue, bool kLimitedValue>
struct Kind {
  static constexpr Curve kCurve = kCurveValue;
  static constexpr bool kLimited = kLimitedValue;
};
// body(Kind<...>()) of an activation that is known when the kernel runs: a branch outside of the loops.
template <class Body>
DEVICE void with_kind(const Activation& a, Body body) {
  switch (a.curve) {
    case Curve::kSilu:
      if (a.limit == INFINITY && a.linear_offset == 0.f) return body(Kind<Curve::kSilu, false>());
      return body(Kind<Curve::kSilu, true>());
    case Curve::kGelu: return body(Kind<Curve::kGelu, true>());
    case Curve::kGeluTanh: return body(Kind<Curve::kGeluTanh, true>());
    case Curve::kRelu: return body(Kind<Curve::kRelu, true>());
    case Curve::kReluSquared: return body(Kind<Curve::kReluSquared, true>());
    default: return body(Kind<Curve::kSigmoid, true>());
  }
}

// Gate and up at one column as the curve and the product see them, and whether their gradients pass the limits. Written
// so that NaN stays NaN, which fminf and fmaxf would drop.
struct Inputs {
  float gate, up;
  bool gate_passes, up_passes;
};
template <bool kLimited>
DEVICE Inputs inputs(const Activation& a, float gate, float up) {
  if constexpr (!kLimited) return {gate, up, true, true};
  const bool gate_over = gate > a.limit, up_over = fabsf(up) > a.limit;
  const float clamped = up_over ? copysignf(a.limit, up) : up;
  return {gate_over ? a.limit : gate, clamped + a.linear_offset, !gate_over, !up_over};
}

}  // namespace fusible
