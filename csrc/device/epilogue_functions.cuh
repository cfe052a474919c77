// SPDX-License-Identifier: Apache-2.0
// The functions that the epilogues of activations compute (device/pointwise.cuh says what a function is), of one number
// of the row: the scale. A kernel has a family of them:
//
//   choose(p, body)   calls body(function) with the one that the parameters ask for
//   gated(p)          whether it has an up half
//   narrow(p)         whether gate and up alternate in blocks narrower than a vector
//
// Besides what device/pointwise.cuh asks for, a function has kVectors: how many vectors a lane differentiates at a time
// where gate and up have vectors of their own. Two hide each other's latencies, where there are registers for them.
#pragma once
#include "device/activation.cuh"
#include "device/pointwise.cuh"
#include "kernels/activation_params.h"

namespace fusible {

// activation(x) * u * scale.
template <class Kind>
struct ActivationFunction {
  static constexpr int kVectors = Kind::kCurve == Curve::kSilu ? 2 : 1;

  DEVICE float forward(float x, float u, const float* scale) const {
    const Inputs in = inputs<Kind::kLimited>(a, x, u);
    return evaluate<Kind::kCurve, true>(in.gate, a.alpha).value * in.up * *scale;
  }
  DEVICE Gradients<1> backward(float x, float u, const float* scale, float dy) const {
    const Inputs in = inputs<Kind::kLimited>(a, x, u);
    const Point point = evaluate<Kind::kCurve, true>(in.gate, a.alpha);
    const float scaled = dy * *scale, activated = point.value * in.up;
    return {activated * *scale,
            in.gate_passes ? scaled * in.up * point.slope : 0.f,
            in.up_passes ? scaled * point.value : 0.f,
            {dy * activated}};
  }

  const Activation& a;
};

struct BuiltInFunctions {
  template <class Body>
  DEVICE static void choose(const ActivationParams& p, Body body) {
    with_kind(p.activation, [&](auto kind) INLINE { body(ActivationFunction<decltype(kind)>{p.activation}); });
  }
  DEVICE static bool gated(const ActivationParams& p) { return p.activation.gated; }
  DEVICE static bool narrow(const ActivationParams& p) { return p.block < 8; }
};

// One function that was generated, for a kernel of its own.
template <class F, bool kNarrow>
struct OneFunction {
  template <class Body>
  DEVICE static void choose(const ActivationParams&, Body body) {
    body(F());
  }
  DEVICE static constexpr bool gated(const ActivationParams&) { return F::kGated; }
  DEVICE static constexpr bool narrow(const ActivationParams&) { return kNarrow; }
};

}  // namespace fusible
