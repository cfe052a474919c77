// SPDX-License-Identifier: Apache-2.0
// Groups whose weights are packed: a warp brings the scales of each stage, as the factors by which its consumers
// decode.
#pragma once
#include "device/gemm/token_groups.cuh"

namespace fusible {

struct PackedGroups : TokenGroupsOfPairs {
  static constexpr int kProducers = 2;  // that warp, and the thread that copies

  // The scales of a stage are on their way while those of the stage before are written.
  template <class K>
  DEVICE static void fetch(typename K::Storage& s, const typename K::Params& p) {
    const int lane = threadIdx.x % 32;
    WorkTileReader tiles(s.work);
    PipelineState<K::kStages> state;
    uint32_t phase = 0;
    for (WorkTile tile; tiles.next(tile); phase ^= 1) {
      typename K::B::template Scales<K> following;
      following.fetch(p.packed, tile, 0, lane);
      for (int block = 0; block < p.k_blocks; ++block) {
        const auto scales = following;
        const bool decodes = block < p.second.k_blocks;
        if (block + 1 < p.second.k_blocks) following.fetch(p.packed, tile, block + 1, lane);
        barrier_wait(&s.empty[state.stage], state.phase ^ 1);
        if (decodes) scales.put(s.scales.factors[state.stage], lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.full[state.stage]);
        state.advance();
      }
      if constexpr (K::kScaleBias) {
        barrier_wait(&s.epilogue.empty, phase ^ 1);
        ::fusible::fill(s.epilogue.stage, p.epilogue, tile, lane);
        barrier_arrive(&s.epilogue.full);
      }
    }
  }
};

}  // namespace fusible
