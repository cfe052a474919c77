// Turns an operand type into kernels for groups of any shapes: one for each layout and output type.
#pragma once
#include "device/epilogue_shaped.cuh"
#include "device/shaped_producer.cuh"
#include "kernels/instantiate.cuh"

namespace fusible {

template <class T, class A, class B>
KernelEntry shaped_entry_of(bool wide_output) {
  constexpr TileVariant kVariant = kTileVariants[kShapedVariant];
  return wide_output ? entry_of<GroupedGemmKernel<T, A, B, float, true, kVariant, ShapedEpilogue, ShapedGroups>>()
                     : entry_of<GroupedGemmKernel<T, A, B, T, true, kVariant, ShapedEpilogue, ShapedGroups>>();
}

template <DType kOperand>
KernelEntry shaped_entry(Layout layout, bool wide_output) {
  using T = Element<kOperand>;
  constexpr int kTileN = kTileVariants[kShapedVariant].tile_n;
  switch (layout) {
    case Layout::kNT: return shaped_entry_of<T, ShapedRows, WeightRows<kTileN>>(wide_output);
    case Layout::kNN: return shaped_entry_of<T, ShapedRows, WeightColumns<kTileN>>(wide_output);
    default: return shaped_entry_of<T, ShapedColumns, WeightColumns<kTileN>>(wide_output);
  }
}

}  // namespace fusible
