// SPDX-License-Identifier: Apache-2.0
// Parameters of the grouped GEMMs that end in an activation, or in its backward: what host and device share.
#pragma once
#include "fusible/activation_kind.h"
#include "kernels/gemm/kernel_entry.h"

namespace fusible {

// Rows are dense: postact [T, columns], preact and dpreact [T, columns] or (gated) [T, 2 * columns]. Null: not wanted,
// or ones (scales).
struct ActivationParams : GemmParams {
  Activation activation;
  RowScale scales;
  int columns;
  int block;  // columns of gate before as many of up
  void* postact;
  // Forward: the product goes to `out` of GemmParams.
  bool keep_preact;
  // Backward: the product is the gradient of `postact`.
  const void* preact;
  void* dpreact;
  float* dscale_partials;  // [subtiles of 64 columns of all tiles, T]: of <dpostact, activation> by row
  float* dbias_partials;   // [blocks of 64 rows, columns of dpreact]: of dpreact by column
  // For a user's function that reads numbers of columns:
  const void* vectors[kColumnInputs];  // as of ColumnVectors
  float* dvector_partials;  // [inputs, tokens / 64 + groups, columns]: of their gradients by column and block
};

}  // namespace fusible
