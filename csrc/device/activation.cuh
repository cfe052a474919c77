// SPDX-License-Identifier: Apache-2.0
// The choice among the built-in activations, which is made when a kernel runs: a branch outside of the loops.
#pragma once
#include "device/functions.cuh"

namespace fusible {

// body(function) of a gated activation, or of one whose up is 1. Silu is compiled without limit and offset too: most
// models have it, and they cost a third of its work.
template <bool kFast, class Body>
DEVICE void with_function(const Activation& a, Body body) {
  if (a.curve == Curve::kSilu && a.limit == INFINITY && a.linear_offset == 0.f) return body(Silu<kFast>{a});
  with_limited_function<kFast>(a, body);
}

}  // namespace fusible
