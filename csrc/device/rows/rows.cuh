// SPDX-License-Identifier: Apache-2.0
// The common part of passes over rows. A warp has a row, so a sum over it needs no other warp.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible {

// body(row) for the rows of this warp, of blocks of so many warps.
template <int kWarps, class Body>
DEVICE void each_row_of_warp(int64_t rows, Body body) {
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < rows; row += gridDim.x * int64_t{kWarps})
    body(row);
}

// The position of the gate of an output column in its row; its up is `block` columns further.
DEVICE unsigned gate_column(unsigned column, unsigned block) {
  return column >= block ? column / block * 2 * block + column % block : column;
}

}  // namespace fusible
