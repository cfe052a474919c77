// SPDX-License-Identifier: Apache-2.0
#include "device/epilogue/epilogue_slots.cuh"
#include "kernels/gemm/instantiate.cuh"
#include "kernels/gemm/slots_entry.h"

namespace fusible {

KernelEntry slots_entry(bool scale_bias, int variant) {
  return dispatch<true, false>(scale_bias, [&](auto scales) {
    constexpr bool kScaleBias = decltype(scales)::value;
    return entry_among<kSlotsVariants>(variant, [](auto number) {
      constexpr TileVariant kVariant = kTileVariants[number.value];
      using T = Element<DType::kBFloat16>;
      using Pair = Operands<Layout::kNT, T, kVariant>;
      return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, T, kScaleBias, kVariant, SlotsEpilogue>>();
    });
  });
}

}  // namespace fusible
