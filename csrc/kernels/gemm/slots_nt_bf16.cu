// SPDX-License-Identifier: Apache-2.0
#include "device/epilogue/epilogue_slots.cuh"
#include "kernels/gemm/instantiate.cuh"
#include "kernels/gemm/slots_entry.h"

namespace fusible {
namespace {

template <bool kScaleBias, int kVariant>
KernelEntry entry_to_slots() {
  constexpr TileVariant kTile = kTileVariants[kVariant];
  using T = Element<DType::kBFloat16>;
  using Pair = Operands<Layout::kNT, T, kTile>;
  return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, T, kScaleBias, kTile, SlotsEpilogue>>();
}

template <bool kScaleBias>
KernelEntry entry_to_slots(int variant) {
  return variant == kSlotsVariants[0] ? entry_to_slots<kScaleBias, kSlotsVariants[0]>()
                                      : entry_to_slots<kScaleBias, kSlotsVariants[1]>();
}

}  // namespace

KernelEntry slots_entry(bool scale_bias, int variant) {
  return scale_bias ? entry_to_slots<true>(variant) : entry_to_slots<false>(variant);
}

}  // namespace fusible
