// SPDX-License-Identifier: Apache-2.0
// What a pointwise program computes for an element: the contract between generated functions and the kernels that take
// them. A function is a type with
//
//   kGated, kRows, kConstants   whether there is an up half; how many numbers of the row and how many constants it
//   reads forward(x, u, r)            the value for x (the gate), u (the up) and r: the numbers of the row, then the
//   constants backward(x, u, r, dy)       that value again, and the gradients of x, u and the numbers of the row
#pragma once
#include "device/math.cuh"

namespace fusible {

template <int kRows>
struct Gradients {
  float y, dx, du;
  float dr[kRows ? kRows : 1];
};

}  // namespace fusible
