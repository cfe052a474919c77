// SPDX-License-Identifier: Apache-2.0
// Turns a layout and an operand type into the kernels that end in an activation or its backward, one for each tile
// variant that they are built for.
#pragma once
#include <iterator>

#include "device/epilogue/epilogue_activation.cuh"
#include "device/epilogue/epilogue_activation_backward.cuh"
#include "fusible/fused_gemm.h"
#include "kernels/gemm/instantiate.cuh"

namespace fusible {

template <class Groups, Layout kLayout, class T, bool kHalves, bool kScaleBias, TileVariant kVariant>
KernelEntry activation_entry_of() {
  using Pair = Operands<kLayout, T, kVariant>;
  using B = std::conditional_t<kHalves, GateUp<kLayout, T, kVariant.tile_n>, typename Pair::B>;
  return entry_of<
      GroupedGemmKernel<typename Pair::A, B, T, kScaleBias, kVariant, ActivationEpilogue<kHalves>, Groups>>();
}
template <class Groups, Layout kLayout, class T, bool kHalves, bool kScaleBias, size_t... kIndices>
KernelEntry activation_entry_of(int variant, std::index_sequence<kIndices...>) {
  KernelEntry entry{};
  if constexpr (!Groups::kShortEnd && !kScaleBias)
    if (variant == kDeepActivationVariant)
      entry = activation_entry_of<Groups, kLayout, T, kHalves, false, kTileVariants[kDeepActivationVariant]>();
  ((variant == kActivationVariants[kIndices]
        ? void(entry = activation_entry_of<Groups, kLayout, T, kHalves, kScaleBias,
                                           kTileVariants[kActivationVariants[kIndices]]>())
        : void()),
   ...);
  return entry;
}
template <class Groups, Layout kLayout, DType kOperand>
KernelEntry activation_entry_of(bool halves, bool scale_bias, int variant) {
  using T = Element<kOperand>;
  constexpr std::make_index_sequence<std::size(kActivationVariants)> kAll;
  if (halves)
    return scale_bias ? activation_entry_of<Groups, kLayout, T, true, true>(variant, kAll)
                      : activation_entry_of<Groups, kLayout, T, true, false>(variant, kAll);
  return scale_bias ? activation_entry_of<Groups, kLayout, T, false, true>(variant, kAll)
                    : activation_entry_of<Groups, kLayout, T, false, false>(variant, kAll);
}
template <Layout kLayout, DType kOperand>
KernelEntry activation_entry(bool halves, bool scale_bias, int variant) {
  return activation_entry_of<TokenGroups, kLayout, kOperand>(halves, scale_bias, variant);
}
template <Layout kLayout, DType kOperand>
KernelEntry arriving_activation_entry(bool halves, bool scale_bias, int variant) {
  return activation_entry_of<ArrivingGroups, kLayout, kOperand>(halves, scale_bias, variant);
}

template <class Groups, Layout kLayout, class T, TileVariant kVariant>
KernelEntry activation_backward_entry_of() {
  using Pair = Operands<kLayout, T, kVariant>;
  return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, T, false, kVariant,
                                    ActivationBackwardEpilogue<>, Groups>>();
}
template <class Groups, Layout kLayout, class T, size_t... kIndices>
KernelEntry activation_backward_entry_of(int variant, std::index_sequence<kIndices...>) {
  KernelEntry entry{};
  ((variant == kBackwardVariants[kIndices]
        ? void(entry = activation_backward_entry_of<Groups, kLayout, T, kTileVariants[kBackwardVariants[kIndices]]>())
        : void()),
   ...);
  return entry;
}
template <class Groups, Layout kLayout, DType kOperand>
KernelEntry activation_backward_entry_of(int variant) {
  return activation_backward_entry_of<Groups, kLayout, Element<kOperand>>(
      variant, std::make_index_sequence<std::size(kBackwardVariants)>());
}
template <Layout kLayout, DType kOperand>
KernelEntry activation_backward_entry(int variant) {
  return activation_backward_entry_of<TokenGroups, kLayout, kOperand>(variant);
}

}  // namespace fusible
