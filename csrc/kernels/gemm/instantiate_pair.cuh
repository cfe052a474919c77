// SPDX-License-Identifier: Apache-2.0
// Turns a layout and an operand type into the kernels with a second pair of operands: of products alone, and of those
// that end in an activation or its backward.
#pragma once
#include "kernels/activation/instantiate_activation.cuh"

namespace fusible {

template <Layout kLayout, DType kOperand>
KernelEntry pair_entry(bool scale_bias, int variant) {
  return dispatch<true, false>(scale_bias, [&](auto scales) {
    constexpr bool kScaleBias = decltype(scales)::value;
    return entry_among<kPairVariants>(variant, [&](auto number) {
      constexpr TileVariant kVariant = kTileVariants[number.value];
      using T = Element<kOperand>;
      using Pair = Operands<kLayout, T, kVariant>;
      if constexpr (kScaleBias && !fits_scale_bias(kVariant)) return KernelEntry{};
      else
        return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, T, kScaleBias, kVariant, StoreEpilogue,
                                          TokenGroupsOfPairs>>();
    });
  });
}

template <Layout kLayout, DType kOperand>
KernelEntry pair_activation_entry(bool halves, bool scale_bias, int variant) {
  return activation_entry_of<TokenGroupsOfPairs, kLayout, kOperand>(halves, scale_bias, variant);
}
template <Layout kLayout, DType kOperand>
KernelEntry pair_activation_backward_entry(int variant) {
  return activation_backward_entry_of<TokenGroupsOfPairs, kLayout, kOperand>(variant);
}

}  // namespace fusible
