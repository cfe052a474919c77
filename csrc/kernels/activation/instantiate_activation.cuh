// SPDX-License-Identifier: Apache-2.0
// Turns a layout and an operand type into the kernels that end in an activation or its backward, one for each tile
// variant that they are built for.
#pragma once
#include "device/epilogue/epilogue_activation.cuh"
#include "device/epilogue/epilogue_activation_backward.cuh"
#include "fusible/fused_gemm.h"
#include "kernels/gemm/instantiate.cuh"

namespace fusible {

template <class Groups, Layout kLayout, DType kOperand>
KernelEntry activation_entry_of(bool halves, bool scale_bias, int variant) {
  return dispatch_bools(halves, scale_bias, [&](auto has_halves, auto scales) {
    constexpr bool kHalves = decltype(has_halves)::value, kScaleBias = decltype(scales)::value;
    return entry_among<kFunctionVariants>(variant, [&](auto number) {
      constexpr TileVariant kVariant = kTileVariants[number.value];
      using T = Element<kOperand>;
      using Pair = Operands<kLayout, T, kVariant>;
      using B = std::conditional_t<kHalves, GateUp<kLayout, T, kVariant.tile_n>, typename Pair::B>;
      if constexpr (number.value == kDeepActivationVariant && (Groups::kShortEnd || kScaleBias)) return KernelEntry{};
      else
        return entry_of<
            GroupedGemmKernel<typename Pair::A, B, T, kScaleBias, kVariant, ActivationEpilogue<kHalves>, Groups>>();
    });
  });
}
template <Layout kLayout, DType kOperand>
KernelEntry activation_entry(bool halves, bool scale_bias, int variant) {
  return activation_entry_of<TokenGroups, kLayout, kOperand>(halves, scale_bias, variant);
}
template <Layout kLayout, DType kOperand>
KernelEntry arriving_activation_entry(bool halves, bool scale_bias, int variant) {
  return activation_entry_of<ArrivingGroups, kLayout, kOperand>(halves, scale_bias, variant);
}

template <class Groups, Layout kLayout, DType kOperand>
KernelEntry activation_backward_entry_of(int variant) {
  return entry_among<kBackwardVariants>(variant, [&](auto number) {
    constexpr TileVariant kVariant = kTileVariants[number.value];
    using T = Element<kOperand>;
    using Pair = Operands<kLayout, T, kVariant>;
    return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, T, false, kVariant,
                                      ActivationBackwardEpilogue<>, Groups>>();
  });
}
template <Layout kLayout, DType kOperand>
KernelEntry activation_backward_entry(int variant) {
  return activation_backward_entry_of<TokenGroups, kLayout, kOperand>(variant);
}

}  // namespace fusible
