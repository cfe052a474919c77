// SPDX-License-Identifier: Apache-2.0
// The parameters of a pointwise kernel. Kernels that are compiled at run time read it too, so it includes no headers of
// the host.
#pragma once
#include <cstdint>

#include "fusible/groups.h"

namespace fusible {

inline constexpr int kPointwiseThreads = 256, kPointwiseConstants = 16;
inline constexpr int kPointwiseOperands = 8;  // inputs of each kind

// Null: not wanted. With an up half, x and dx have twice the columns, in alternating blocks of gate and up; so have
// operands of gate and up, which are two inputs.
struct PointwiseParams {
  int64_t rows;
  unsigned columns, block;  // of y; columns of gate before as many of up
  const void *x, *dy;
  void *y, *dx;
  const void* numbers[kPointwiseOperands];  // [rows] each
  void* dnumbers[kPointwiseOperands];       // in their types
  const void* vectors[kPointwiseOperands];  // [groups, columns] each, or [columns] of all rows
  float* dcolumns[kPointwiseOperands];  // [rows, columns] each: the gradients of the vectors, not yet summed by group
  const void* matrices[kPointwiseOperands];  // [rows, columns] each
  void* dmatrices[kPointwiseOperands];       // in their types
  SplitSizes sizes;                          // of the groups; null sizes: there is one, of all rows
  float constants[kPointwiseConstants];
};

}  // namespace fusible
