// SPDX-License-Identifier: Apache-2.0
// The built-in activations as functions of gate, up and the scale of the row, around curves that are generated; and the
// choice among them, which is made when a kernel runs: a branch outside of the loops.
#pragma once
#include "device/functions/functions.cuh"

namespace fusible {

// scale * curve(gate) * up. kLimited: both are clamped first, and up has an offset. Clamped values have gradient zero,
// NaN passes. An up of 1 stands for an activation without a gate.
template <class Curve, bool kLimited>
struct BuiltInFunction {
  static constexpr int kVectors = Curve::kVectors;

  DEVICE float forward(float gate, float up, const float* scale) const {
    return *scale * (Curve::forward(clamped(gate), 1.f, &a.alpha) * factor(up));
  }
  DEVICE Gradients<1> backward(float gate, float up, const float* scale, float dy) const {
    const float dproduct = dy * *scale, x = clamped(gate), u = factor(up);
    const auto curve = Curve::backward(x, 1.f, &a.alpha, dproduct * u);
    const float product = curve.y * u, dup = dproduct * curve.y;
    // clamped values are smaller than before: a comparison to the limit would make the 16-bit quantising kernels spill
    const bool gate_is_over = kLimited && x < gate, up_is_over = kLimited && a.limit < fabsf(up);
    return {*scale * product, gate_is_over ? 0.f : curve.dx, up_is_over ? 0.f : dup, {dy * product}};
  }

  const Activation& a;

 private:
  DEVICE float clamped(float gate) const { return kLimited ? ptx::min_nan(a.limit, gate) : gate; }
  DEVICE float factor(float up) const {
    return kLimited ? a.linear_offset + ptx::min_nan(a.limit, ptx::max_nan(up, -a.limit)) : up;
  }
};

// body(function) of an activation without limit and offset.
template <bool kFast, class Body>
DEVICE void with_unlimited_function(const Activation& a, Body body) {
  with_curve<kFast>(a.curve, [&]<class C>(C) INLINE { body(BuiltInFunction<C, false>{a}); });
}

// body(function) of a gated activation, or of one whose up is 1. Silu is compiled without limit and offset too: most
// models have it, and they cost a third of its work.
template <bool kFast, class Body>
DEVICE void with_function(const Activation& a, Body body) {
  if (a.curve == Curve::kSilu && a.limit == INFINITY && a.linear_offset == 0.f)
    return body(BuiltInFunction<Silu<kFast>, false>{a});
  with_curve<kFast>(a.curve, [&]<class C>(C) INLINE { body(BuiltInFunction<C, true>{a}); });
}

}  // namespace fusible
