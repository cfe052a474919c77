// SPDX-License-Identifier: Apache-2.0
// The parameters of products of e4m3 operands, and their kernels.
#pragma once
#include "kernels/kernel_entry.h"

namespace fusible {

// The scales of all weights, in floats. A tile's first 128 columns have block `tile_step` times the tile's column; the
// other 128, of a tile that has them, one that is `unit_step` blocks further.
struct WeightScales {
  const float* data;
  int64_t group, row, column;
  int tile_step, unit_step;
};

// Scales of 128 rows of A begin at any token, but a bulk copy only at multiples of 16 bytes: it brings four more.
inline constexpr int kRowScalesBox = 132;

// P: those of the epilogue.
template <class P>
struct Params1D2D : P {
  CUtensorMap a_scales;  // [blocks of k, T]
  WeightScales b_scales;
};
template <class P>
struct Params1D1D : P {
  CUtensorMap a_scales, b_scales;  // [blocks of tokens, rows of the operand]
};

// Without a function where the variant is not built for it.
KernelEntry scaled_entry(DType out, bool scale_bias, int variant);
KernelEntry scaled_halves_entry(DType out, bool scale_bias);  // of variant 0
KernelEntry row_scaled_entry(DType out, bool fast, int variant);  // a position in kRowScaledVariants
KernelEntry scaled_wgrad_entry(DType out, int variant);

}  // namespace fusible
