// SPDX-License-Identifier: Apache-2.0
// The choice among the built-in activations, which is made when a kernel runs: a branch outside of the loops.
#pragma once
#include "device/functions.cuh"

namespace fusible {

// A function of gate and up that are clamped before, of an up with an offset. What was clamped has gradient zero, NaN
// passes.
template <class F>
struct Limited {
  static constexpr int kVectors = F::kVectors;

  DEVICE float forward(float x, float u, const float* r) const { return function.forward(gate(x), up(u), r); }
  DEVICE Gradients<1> backward(float x, float u, const float* r, float dy) const {
    Gradients<1> d = function.backward(gate(x), up(u), r, dy);
    d.dx = a.limit < x ? 0.f : d.dx;
    d.du = a.limit < fabsf(u) ? 0.f : d.du;
    return d;
  }
  DEVICE float gate(float x) const { return ptx::min_nan(a.limit, x); }
  DEVICE float up(float u) const { return ptx::min_nan(a.limit, ptx::max_nan(u, -a.limit)) + a.linear_offset; }

  F function;
  const Activation& a;
};

// body(function) of a gated activation, or of one whose up is 1. Silu is compiled without limit and offset too: most
// models have it, and they cost a third of its work.
template <bool kFast, class Body>
DEVICE void with_function(const Activation& a, Body body) {
  if (a.curve == Curve::kSilu && a.limit == INFINITY && a.linear_offset == 0.f) return body(Silu<kFast>{a});
  with_unlimited_function<kFast>(a, [&](auto function) INLINE { body(Limited<decltype(function)>{function, a}); });
}

}  // namespace fusible
