// SPDX-License-Identifier: Apache-2.0
// What a pointwise kernel is launched with. Kernels that are compiled at run time read it too, so it includes no
// headers of the host.
#pragma once
#include <cstdint>

#include "fusible/groups.h"

namespace fusible {

inline constexpr int kPointwiseThreads = 256, kPointwiseConstants = 16;

// Null: not wanted. With an up half, x and dx have twice the columns: blocks of gate and of up alternate.
struct PointwiseParams {
  int64_t rows;
  unsigned columns, block;  // of y; columns of gate before as many of up
  const void *x, *dy;
  void *y, *dx;
  const void* numbers;  // [kRows, rows]
  void* dnumbers;       // in their type
  const void* vectors;  // [kColumns, groups, columns]
  float* dcolumns;      // [kColumns, rows, columns]: the gradients of the vectors, before they are summed by group
  SplitSizes sizes;     // of the groups; null sizes: there is one, of all rows
  float constants[kPointwiseConstants];
};

}  // namespace fusible
