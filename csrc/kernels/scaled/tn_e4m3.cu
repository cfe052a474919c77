// SPDX-License-Identifier: Apache-2.0
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {

KernelEntry scaled_wgrad_entry(DType out, int variant) {
  return dispatch_dtype(out, [&](auto type) {
    return dispatch<0, 1>(variant, [](auto number) {
      constexpr TileVariant kVariant = kScaledWgradVariants[number.value];
      using Out = Element<decltype(type)::value>;
      if constexpr (number.value > 0 && std::is_same_v<Out, float>) return KernelEntry{};
      else
        return entry_of<GroupedGemmKernel<BlockedTokens<E4M3>, BlockedTokensB<E4M3, kVariant.tile_n>, Out, false,
                                          kVariant, StoreEpilogue, BlockedGroups, Scaling1D1D>>();
    });
  });
}

}  // namespace fusible
