// SPDX-License-Identifier: Apache-2.0
// Turns results and tile variants into kernels for e4m3 operands.
#pragma once
#include "kernels/gemm/instantiate.cuh"

namespace fusible {

// Products of rows with weights.
template <class Out, bool kScaleBias, class Scaling, class Epilogue = StoreEpilogue, bool kHalves = false>
KernelEntry scaled_rows_entry() {
  constexpr int kTileN = kScaledVariant.tile_n;
  using B = std::conditional_t<kHalves, GateUpRows<E4M3, kTileN>, WeightRows<E4M3, kTileN>>;
  return entry_of<
      GroupedGemmKernel<TokenRows<E4M3>, B, Out, kScaleBias, kScaledVariant, Epilogue, TokenGroups, Scaling>>();
}

}  // namespace fusible
