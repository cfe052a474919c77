// SPDX-License-Identifier: Apache-2.0
// The parameters of products of e4m3 operands, and their kernels.
#pragma once
#include "fusible/quantized_copies.h"
#include "kernels/activation/activation_params.h"

namespace fusible {

// The scales of all weights, in floats. The first 128 columns of a tile have block `tile_step` times the tile's column;
// its other 128 columns, if any, have the block `unit_step` later.
struct WeightScales {
  const float* data;
  int64_t group, row, column;
  int tile_step, unit_step;
};

// Scales of 128 rows of A begin at any token, but a bulk copy only at multiples of 16 bytes: it brings four more.
inline constexpr int kRowScalesBox = 132;

// P: the epilogue's params.
template <class P>
struct Params1D2D : P {
  CUtensorMap a_scales;  // [blocks of k, T]
  WeightScales b_scales;
};
template <class P>
struct Params1D1D : P {
  CUtensorMap a_scales, b_scales;  // [blocks of tokens, rows of the operand]
};

// `rows`: of the activation, in the place of its `postact`.
struct QuantizedActivationParams : ActivationParams {
  QuantizedRows rows;
  bool power_of_two;
};

// Without a function where the variant is not built for it.
KernelEntry scaled_entry(DType out, bool scale_bias,
                         bool halves);  // `halves`: a tile has as many columns of either half
KernelEntry row_scaled_entry(DType out, bool fast);
KernelEntry scaled_wgrad_entry(DType out, int variant);
// Into rows of 16 bits and of e4m3. `halves`: a tile has as many columns of gate as of up.
KernelEntry scaled_activation_entry(DType out, bool halves, bool scale_bias);

}  // namespace fusible
