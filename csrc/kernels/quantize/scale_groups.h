// SPDX-License-Identifier: Apache-2.0
// out = beta[g] * out for the output of every group, rounded to its type: what beta other than nothing and one comes
// before the sum.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/gemm/kernel_entry.h"

namespace fusible {

// The output is rows of a token buffer, or a matrix of `fixed_rows` for each group. Where beta is 0 it is zeroed
// without being read; where beta is 1 it is left alone, and so are rows of no group.
struct ScaleGroups {
  void* out;
  DType type;
  int64_t pitch, group_stride, columns;  // in elements
  const GroupCoordinate* coordinates;    // of each group's matrix; null where they are one tensor
  SplitSizes sizes;
  int64_t tokens;
  int64_t fixed_rows;  // 0: the tokens of the group
  const float* betas;  // [groups]; null: `beta` for all of them
  float beta;
};

cudaError_t scale_groups(const ScaleGroups& call, int multiprocessors, cudaStream_t stream);

}  // namespace fusible
