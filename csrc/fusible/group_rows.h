// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of each group, and products of rows with their group's vector: the gradients of biases and of
// their scales. The group sizes are read on the device, so both can be captured in a graph. Both are bitwise the same
// from run to run.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/gemm_config.h"
#include "fusible/zeroing.h"

namespace fusible {

// rows[tokens, columns], `pitch` elements from one to the next.
struct DenseRows {
  const void* data;
  DType type;
  int64_t tokens, columns, pitch;
};

// out[g, n] = sum over the rows t of group g of scale[t] * rows[t, n], in fp32, rounded once; zero for an empty group.
struct ColumnSums {
  DenseRows rows;
  const float* scale;  // [tokens]; null for ones
  SplitSizes sizes;
  void* out;  // [groups, columns]
  DType out_type;
  float* workspace;  // column_sums_workspace() bytes
};

// out[t] = sum over n of rows[t, n] * vectors[group of t, n], in fp32; zero for rows past the last group.
struct RowDots {
  DenseRows rows;
  const void* vectors;  // [groups, columns], contiguous, in the type of the rows or fp32
  DType vectors_type;
  SplitSizes sizes;
  float* out;
};

int64_t column_sums_workspace(int64_t tokens, int64_t columns, int groups);

// Both throw fusible::Error if the launch fails.
void column_sums(const ColumnSums& call, int device, cudaStream_t stream);
void row_dots(const RowDots& call, int device, cudaStream_t stream);

}  // namespace fusible
