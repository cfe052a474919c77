// SPDX-License-Identifier: Apache-2.0
// Turns results and tile variants into kernels for e4m3 operands.
#pragma once
#include <iterator>

#include "kernels/gemm/instantiate.cuh"

namespace fusible {

template <class Out, bool kScaleBias>
using ScaledKernel = GroupedGemmKernel<TokenRows<E4M3>, WeightRows<E4M3, kScaledVariant.tile_n>, Out, kScaleBias,
                                       kScaledVariant, StoreEpilogue, TokenGroups, Scaling1D2D>;
// Columns of two halves, whose scales restart with the second.
template <class Out, bool kScaleBias>
using ScaledHalvesKernel = GroupedGemmKernel<TokenRows<E4M3>, GateUpRows<E4M3, kScaledVariant.tile_n>, Out, kScaleBias,
                                             kScaledVariant, HalvesStoreEpilogue, TokenGroups, Scaling1D2D>;
template <class Out, TileVariant kVariant>
using ScaledWgradKernel = GroupedGemmKernel<BlockedTokens<E4M3>, BlockedTokensB<E4M3, kVariant.tile_n>, Out, false,
                                            kVariant, StoreEpilogue, BlockedGroups, Scaling1D1D>;

template <class Out, int kVariant>
KernelEntry scaled_wgrad_entry_of_variant() {
  if constexpr (kVariant > 0 && std::is_same_v<Out, float>) return {};
  else return entry_of<ScaledWgradKernel<Out, kScaledWgradVariants[kVariant]>>();
}

template <class Out, size_t... kVariants>
KernelEntry scaled_wgrad_entry_of(int variant, std::index_sequence<kVariants...>) {
  const KernelEntry entries[] = {scaled_wgrad_entry_of_variant<Out, kVariants>()...};
  return entries[variant];
}

}  // namespace fusible
