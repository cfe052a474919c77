// SPDX-License-Identifier: Apache-2.0
// How a consumer hands a complete block of 64 rows over to those that store it.
#pragma once
#include "device/epilogue.cuh"

namespace fusible {

// Where a consumer is in its output stages, and in the bias and factors of its tiles.
template <class K>
struct HandOverState {
  PipelineState<K::Layout::kSlots> slot;
  [[maybe_unused]] uint32_t epilogue_phase = 0;

  // Once all blocks of the tile have been handed over.
  DEVICE void end_tile(typename K::Storage& s) {
    if constexpr (K::kScaleBias) {
      barrier_arrive(&s.epilogue.empty);
      epilogue_phase ^= 1;
    }
  }
  // In place of `hand_over` and `end_tile`, where the consumer has no rows of the tile.
  DEVICE void skip_tile(typename K::Storage& s) {
    if constexpr (K::kScaleBias) barrier_wait(&s.epilogue.full, epilogue_phase);
    end_tile(s);
  }
};

// Block number kBlock of the consumer's.
template <class K, int kBlock>
DEVICE void hand_over(typename K::Storage& s, const typename K::Params& p, float (&acc)[K::kTileN / 2], int consumer,
                      int warp, int lane, HandOverState<K>& state) {
  using Layout = typename K::Layout;
  using Out = typename K::Out;
  auto& slot = state.slot;
  if constexpr (K::kScaleBias) {
    barrier_wait(&s.epilogue.full, state.epilogue_phase);
    apply(s.epilogue.stage, acc, (consumer + kBlock * kConsumers) * 64, warp, lane);
  }
#pragma unroll
  for (int part = 0; part < Layout::kParts; ++part) {
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
      slot.stage = (part + 1) % Layout::kSlots;  // as it is, but known to the compiler
  }
}

}  // namespace fusible
