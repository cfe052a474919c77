// SPDX-License-Identifier: Apache-2.0
// Tensor maps for the operands and outputs of a grouped GEMM. The driver's encoder is looked up at run time, so that
// nothing links to libcuda. The boxes are what one copy of the operand of that name moves (device/gemm/operands.cuh,
// device/epilogue/epilogue.cuh). The base of a map of loads lies in the tensor: TMA touches it for boxes out of bounds.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <span>

#include "fusible/gemm_config.h"

namespace fusible {

// A tensor as a map has it, but for its address. Sizes and box in elements, innermost first; strides in bytes, of
// dimensions 1 and up.
struct MapForm {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion promotion;
  CUtensorMapFloatOOBfill fill;
  std::span<const uint64_t> sizes, strides;
  std::span<const uint32_t> box;
};
CUtensorMap encode_map(uintptr_t base, const MapForm& form);

// A row-major matrix, or one for each group: at equal distances (`group_stride`), or where `addresses` say; `data` is
// then the lowest of them. Pitch and stride in elements.
struct MatrixView {
  const void* data;
  DType type;
  int64_t pitch, group_stride;
  std::span<const uintptr_t> addresses{};
};

// The matrices of the groups have two dimensions more in their maps. At equal distances these are the group and zero;
// otherwise 16 bytes and 16 GB of distance from the lowest address, so that one map reaches matrices anywhere in
// memory. A group's coordinates:
inline constexpr int kNearBits = 30, kNearBytes = 16;

// a[T, k], `box` tokens x 64 values of k.
CUtensorMap token_rows_map(const MatrixView& a, int64_t tokens, int64_t k, int box);
// a[T, columns] as depth: token s + r of a group of n tokens that starts at s is addressed as (2^30 - n + r, 2^30, s +
// n), and r >= n loads as zero.
CUtensorMap ragged_depth_map(const MatrixView& a, int64_t tokens, int64_t columns);
// b[n, k] of each group, tile_n / 2 rows x 64 values of k.
CUtensorMap weight_rows_map(const MatrixView& b, int64_t groups, int64_t n, int64_t k, int tile_n);
// b[2, half, k] of each group, gate and up: tile_n / 2 rows of one half x 64 values of k.
CUtensorMap gate_up_rows_map(const MatrixView& b, int64_t groups, int64_t half, int64_t k, int tile_n);
// b[k, 2, half] of each group, gate and up: 64 values of k x 64 columns of one half.
CUtensorMap gate_up_columns_map(const MatrixView& b, int64_t groups, int64_t half, int64_t k);
// b[k, n] of each group, 64 values of k x 64 columns, or 32 x 64: an odd number of chunks of 64 columns does not divide
// between two blocks.
CUtensorMap weight_columns_map(const MatrixView& b, int64_t groups, int64_t k, int64_t n, int tile_n);
// b[n, k / 2] of each group, two codes of 4 bits a byte: 64 rows x 64 values of k, or (transposed) 32 rows x 128.
CUtensorMap packed_weight_map(const MatrixView& b, int64_t groups, int64_t n, int64_t k, bool transposed);
// a[blocks, columns, 128] of a type of one byte: `box` columns of one block.
CUtensorMap blocked_tokens_map(const MatrixView& a, int64_t blocks, int64_t columns, int box);
// Scales [blocks, rows of an operand], `pitch` floats from a block to the next: `box` rows of one block.
CUtensorMap scales_map(const float* scales, int64_t rows, int64_t blocks, int64_t pitch, int box);
// out[T, n], `box` rows x 128 bytes: row s + r of n that begin at s is addressed as (T - n + r, s + n, 0), and r >= n
// is dropped.
CUtensorMap token_output_map(const MatrixView& out, int64_t tokens, int64_t n, int box);
// The same for out[T, 2, half]; the half is the second coordinate.
CUtensorMap gate_up_output_map(const MatrixView& out, int64_t tokens, int64_t half);
// out[m, n] of each group.
CUtensorMap weight_output_map(const MatrixView& out, int64_t groups, int64_t m, int64_t n);
// A model map: a box of 128 bytes x `box_rows`, in 2 or 4 dimensions, the last two of size 1. Address, sizes and pitch
// are set on the device (device/ptx/map_update.cuh); until then the address is `any` that is aligned to 16 bytes.
CUtensorMap model_map(const void* any, DType type, int dimensions, int box_rows);

}  // namespace fusible
