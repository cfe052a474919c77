// SPDX-License-Identifier: Apache-2.0
// What a pointwise program computes for an element: the contract between generated functions and the kernels that take
// them. `r` holds the numbers of the row, then those of the column and the constants. A function is a type with
//
//   forward(x, u, r)        the value for x (the gate) and u (the up)
//   backward(x, u, r, dy)   that value again, and the gradients of x, u and the numbers of the row
//
// The functions of users also have kGated, kRows, kColumns and kConstants: whether there is an up half, and how many
// numbers of each kind there are. The built-in ones (device/functions.cuh) read their constants from an Activation.
#pragma once
#include "device/math.cuh"

namespace fusible {

template <int kRows>
struct Gradients {
  float y, dx, du;
  float dr[kRows ? kRows : 1];
};

}  // namespace fusible
