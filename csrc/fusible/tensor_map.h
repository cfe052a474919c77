// Tensor maps for the operands and outputs of a grouped GEMM. The driver's encoder is looked up at run time, so that nothing
// links to libcuda. The boxes are what one copy of the operand of that name moves (device/operands.cuh, device/epilogue.cuh).
#pragma once
#include <cuda.h>

#include <cstdint>

#include "fusible/gemm_config.h"

namespace fusible {

// A row-major matrix, or (with `group_stride`) one for each group. Pitch and stride in elements.
struct MatrixView {
  const void* data;
  DType type;
  int64_t pitch, group_stride;
};

// a[T, k], 64 tokens x 64 values of k.
CUtensorMap token_rows_map(const MatrixView& a, int64_t tokens, int64_t k);
// a[T, columns] as depth: token s + r of a group of n tokens that starts at s is addressed as (2^30 - n + r, 2^30, s + n), and
// r >= n loads as zero.
CUtensorMap ragged_depth_map(const MatrixView& a, int64_t tokens, int64_t columns);
// b[E, n, k], tile_n / 2 rows x 64 values of k.
CUtensorMap weight_rows_map(const MatrixView& b, int64_t groups, int64_t n, int64_t k, int tile_n);
// b[E, k, n], 64 values of k x 64 columns, or 32 x 64: three chunks of 64 columns do not divide between two blocks.
CUtensorMap weight_columns_map(const MatrixView& b, int64_t groups, int64_t k, int64_t n, int tile_n);
// out[T, n]: row s + r of a group is addressed as (T - n + r, s + n), and r >= n is dropped.
CUtensorMap token_output_map(const MatrixView& out, int64_t tokens, int64_t n);
// out[E, m, n].
CUtensorMap weight_output_map(const MatrixView& out, int64_t groups, int64_t m, int64_t n);

}  // namespace fusible
