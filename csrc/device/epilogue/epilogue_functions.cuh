// SPDX-License-Identifier: Apache-2.0
// The functions that the epilogues of activations compute (device/functions/pointwise.cuh says what a function is), of
// one number of the row: the scale. A kernel has a family of them:
//
//   choose(p, body)   calls body(function) with the one that the parameters ask for
//   gated(p)          whether it has an up half
//   narrow(p)         whether gate and up alternate in blocks narrower than a vector
//   kColumns, Columns how many numbers of a column they read, and their types (ColumnOperand)
//   kNarrow           narrow(p), where they read such
//   kSums             of how many of these the backward sums the gradients
//   kMatrices, Matrices how many numbers of the element they read, and their types (MatrixOperand)
//   kScales           whether there may be a scale; without one it is 1, which the compiler then knows
//
// Besides what device/functions/pointwise.cuh asks for, a function has kVectors: how many vectors a lane differentiates
// at a time where gate and up have vectors of their own. Two hide each other's latencies, where there are registers for
// them.
#pragma once
#include "device/functions/activation.cuh"
#include "device/functions/pointwise.cuh"
#include "kernels/activation/activation_params.h"

namespace fusible {

struct BuiltInFunctions {
  static constexpr int kColumns = 0, kSums = 0, kMatrices = 0;
  static constexpr bool kNarrow = false, kScales = true;
  using Columns = Types<>;
  using Matrices = Types<>;

  template <class Body>
  DEVICE static void choose(const ActivationParams& p, Body body) {
    with_function<true>(p.activation, body);
  }
  DEVICE static bool gated(const ActivationParams& p) { return p.activation.gated; }
  DEVICE static bool narrow(const ActivationParams& p) { return p.block < 8; }
};

// One function that was generated, for a kernel of its own.
template <class F, bool kNarrow_, bool kScales_, class Columns_ = Types<>, bool kSumsColumns = false,
          class Matrices_ = Types<>>
struct OneFunction {
  static_assert(F::kRows == 1 && F::kConstants == 0, "the scale; constants are numbers of its code");
  static constexpr int kColumns = F::kColumns, kSums = kSumsColumns ? kColumns : 0, kMatrices = F::kMatrices;
  static constexpr bool kNarrow = kNarrow_, kScales = kScales_;
  using Columns = Columns_;
  using Matrices = Matrices_;

  template <class Params, class Body>
  DEVICE static void choose(const Params&, Body body) {
    body(F());
  }
  DEVICE static constexpr bool gated(const ActivationParams&) { return F::kGated; }
  DEVICE static constexpr bool narrow(const ActivationParams&) { return kNarrow; }
};

}  // namespace fusible
