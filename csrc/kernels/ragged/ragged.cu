// SPDX-License-Identifier: Apache-2.0
// The kernels for groups of any shapes: one for each layout, operand type and output type.
#include "device/epilogue/epilogue_ragged.cuh"
#include "device/gemm/ragged_producer.cuh"
#include "kernels/gemm/instantiate.cuh"

namespace fusible {

template <class T, class A, class B>
KernelEntry ragged_entry_of(bool fp32_output) {
  constexpr TileVariant kVariant = kTileVariants[kRaggedVariant];
  return fp32_output ? entry_of<GroupedGemmKernel<A, B, float, true, kVariant, RaggedEpilogue, RaggedGroups>>()
                     : entry_of<GroupedGemmKernel<A, B, T, true, kVariant, RaggedEpilogue, RaggedGroups>>();
}

template <DType kOperand>
KernelEntry ragged_entry(Layout layout, bool fp32_output) {
  using T = Element<kOperand>;
  constexpr int kTileN = kTileVariants[kRaggedVariant].tile_n;
  switch (layout) {
    case Layout::kNT: return ragged_entry_of<T, RaggedRows<T>, WeightRows<T, kTileN>>(fp32_output);
    case Layout::kNN: return ragged_entry_of<T, RaggedRows<T>, WeightColumns<T, kTileN>>(fp32_output);
    default: return ragged_entry_of<T, RaggedColumns<T>, WeightColumns<T, kTileN>>(fp32_output);
  }
}

template KernelEntry ragged_entry<DType::kBFloat16>(Layout, bool);
template KernelEntry ragged_entry<DType::kFloat16>(Layout, bool);

}  // namespace fusible
