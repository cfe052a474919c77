// SPDX-License-Identifier: Apache-2.0
// A pointwise program for one element: the contract between generated functions and the kernels that take them. A
// function is a type with
//
//   kGated                 whether there is an up half
//   kRows, kColumns        how many numbers of the row, and of the column, it reads
//   kMatrices              how many of the element, besides x and u
//   kConstants             and how many constants
//   forward(x, u, r)       the value for x (the gate), u (the up) and r, in which all these numbers follow one another
//   backward(x, u, r, dy)  that value again, and the gradients of x, u and, in dr, of all of r but the constants
#pragma once
#include "device/functions/math.cuh"

namespace fusible {

// The types of operands, one by one: body.operator()<T>(i) for the i-th.
template <class... Ts>
struct Types {
  template <class Body>
  DEVICE static void each(Body body) {
    [[maybe_unused]] int i = 0;
    (body.template operator()<Ts>(i++), ...);
  }
};

// An input that is a number of a column. kOfAllRows: shared by all groups; kOfBoth: one of two inputs, for gate and up.
template <class T, bool kOfAllRows_, bool kOfBoth_>
struct ColumnOperand {
  using Number = T;
  static constexpr bool kOfAllRows = kOfAllRows_, kOfBoth = kOfBoth_;
};
// One that is a number of an element.
template <class T, bool kOfBoth_>
struct MatrixOperand {
  using Number = T;
  static constexpr bool kOfBoth = kOfBoth_;
};

template <int kNumbers>
struct Gradients {
  float y, dx, du;
  float dr[kNumbers ? kNumbers : 1];
};

}  // namespace fusible
