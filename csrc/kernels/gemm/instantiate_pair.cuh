// SPDX-License-Identifier: Apache-2.0
// Turns a layout and an operand type into the kernels with a second pair of operands: of products alone, and of those
// that end in an activation or its backward.
#pragma once
#include "kernels/activation/instantiate_activation.cuh"

namespace fusible {

template <Layout kLayout, class T, bool kScaleBias, TileVariant kVariant>
KernelEntry pair_entry_of() {
  using Pair = Operands<kLayout, T, kVariant>;
  if constexpr (kScaleBias && !fits_scale_bias(kVariant)) return {};
  else
    return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, T, kScaleBias, kVariant, StoreEpilogue,
                                      TokenGroupsOfPairs>>();
}
template <Layout kLayout, class T, bool kScaleBias, size_t... kIndices>
KernelEntry pair_entry_of(int variant, std::index_sequence<kIndices...>) {
  KernelEntry entry{};
  ((variant == kPairVariants[kIndices]
        ? void(entry = pair_entry_of<kLayout, T, kScaleBias, kTileVariants[kPairVariants[kIndices]]>())
        : void()),
   ...);
  return entry;
}
template <Layout kLayout, DType kOperand>
KernelEntry pair_entry(bool scale_bias, int variant) {
  using T = Element<kOperand>;
  constexpr std::make_index_sequence<std::size(kPairVariants)> kAll;
  return scale_bias ? pair_entry_of<kLayout, T, true>(variant, kAll) : pair_entry_of<kLayout, T, false>(variant, kAll);
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
