// SPDX-License-Identifier: Apache-2.0
// Groups whose weights are packed: a warp brings the scales of each stage, as the factors by which its consumers
// decode.
#pragma once
#include "device/gemm/token_groups.cuh"

namespace fusible {

struct PackedGroups : TokenGroupsOfPairs {
  static constexpr int kProducers = 2;  // that warp, and the thread that copies

  // Scales of so many stages are fetched at a time, while those of the stages before are written: a load takes longer
  // than the product of a stage.
  static constexpr int kFetched = 4;
  template <class K>
  DEVICE static void fetch(typename K::Storage& s, const typename K::Params& p) {
    using Scales = typename K::B::template Scales<K>;
    const int lane = threadIdx.x % 32, decoded = p.second.k_blocks;
    WorkTileReader tiles(s.work);
    PipelineState<K::kStages> state;
    uint32_t phase = 0;
    for (WorkTile tile; tiles.next(tile); phase ^= 1) {
      const Scales scales(p.packed, tile, lane);
      uint32_t following[kFetched][4];  // of 16 bits each
      const auto fetch_from = [&](int block) INLINE {
#pragma unroll
        for (int i = 0; i < kFetched; ++i) scales.fetch(following[i], min(block + i, decoded - 1));
      };
      fetch_from(0);
      for (int first = 0; first < p.k_blocks; first += kFetched) {
        uint32_t now[kFetched][2], all = 0;
#pragma unroll
        for (int i = 0; i < kFetched * 2; ++i) {
          const uint32_t* two = &following[i / 2][i % 2 * 2];
          now[i / 2][i % 2] = ptx::permute<0x5410>(two[0], two[1]);
          all |= two[0] | two[1];
        }
        // Loads of a warp share a counter, so a wait for one is a wait for all. Therefore the next ones are issued
        // after these have arrived: their addresses depend on the upper half of what was loaded, which is zero, but the
        // compiler does not know it.
        const int zero = static_cast<int>(ptx::permute<0x4432>(all, 0));
        if (first + kFetched < decoded) fetch_from(first + kFetched + zero);
#pragma unroll
        for (int i = 0; i < kFetched; ++i) {
          const int block = first + i;
          if (block >= p.k_blocks) break;
          barrier_wait(&s.empty[state.stage], state.phase ^ 1);
          if (block < decoded) Scales::put(now[i], s.scales.factors[state.stage], lane);
          __syncwarp();
          if (lane == 0) barrier_arrive(&s.full[state.stage]);
          state.advance();
        }
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
