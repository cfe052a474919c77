// SPDX-License-Identifier: Apache-2.0
// How a consumer hands a complete block of 64 rows over to those that store it.
#pragma once
#include "device/epilogue/epilogue.cuh"

namespace fusible {

// Called after a consumer has handed over all blocks of a tile; `phase` is that of the tile's bias and factors.
template <class K>
DEVICE void end_tile(typename K::Storage& s, uint32_t& phase) {
  if constexpr (K::kScaleBias) {
    barrier_arrive(&s.epilogue.empty);
    phase ^= 1;
  }
}
// Called if the consumer has no rows of the tile.
template <class K>
DEVICE void pass_over_tile(typename K::Storage& s, uint32_t& phase) {
  if constexpr (K::kScaleBias) barrier_wait(&s.epilogue.full, phase);
  end_tile<K>(s, phase);
}

// Block number kBlock of the consumer's, into the output stages from `slot` on.
template <class K, int kBlock>
DEVICE void hand_over(typename K::Storage& s, const typename K::Params& p, float (&acc)[K::kTileN / 2], int consumer,
                      int warp, int lane, PipelineState<K::Layout::kSlots>& slot, uint32_t phase) {
  using Layout = typename K::Layout;
  using Out = typename K::Out;
  if constexpr (K::kScaleBias) barrier_wait(&s.epilogue.full, phase);
#pragma unroll
  for (int part = 0; part < Layout::kParts; ++part) {
    if constexpr (K::kScaleBias)
      apply<K::kTileN / Layout::kParts>(s.epilogue.stage, acc, part, (consumer + kBlock * kConsumers) * 64, warp, lane);
    uint8_t* smem_out = s.smem_out[consumer] + slot.stage * Layout::kPartBytes;
    bool fetches = false;
    if constexpr (K::kFetchesOld) fetches = p.accumulate;
    barrier_wait(&s.out_empty[consumer][slot.stage], slot.phase ^ (fetches ? 0 : 1));
    if (K::kFetchesOld && fetches && (p.fetch_all || (kBlock == 0 && part < Layout::kSlots)))
      store_to_smem<Layout, Out, K::kFetchesOld>(acc, smem_out, part, warp, lane);
    else store_to_smem<Layout, Out>(acc, smem_out, part, warp, lane);
    ptx::async_proxy_fence();
    if constexpr (!K::kWholeWarp) __syncwarp();
    if (K::kWholeWarp || lane == 0) barrier_arrive(&s.out_full[consumer][slot.stage]);
    slot.advance();
    if (Layout::kParts % Layout::kSlots == 0)
      slot.stage = (part + 1) % Layout::kSlots;  // unchanged, but known to the compiler
  }
}

}  // namespace fusible
