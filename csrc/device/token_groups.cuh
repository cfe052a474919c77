// SPDX-License-Identifier: Apache-2.0
// Groups that are rows of a token buffer, or its depth. RaggedGroups (ragged_producer.cuh) have shapes of their own.
#pragma once
#include "device/mainloop.cuh"

namespace fusible {

struct TokenGroups {
  template <TileVariant kVariant, bool kRaggedRows>
  using Scheduler = TileScheduler<kVariant, kRaggedRows>;
  using Table = GroupTable;
  static constexpr int kProducers = 1;
  template <class K>
  DEVICE static void fill(typename K::Storage& s, const typename K::Params& p, int lane) {
    K::Scheduler::fill(s.groups, p.shape, lane);
  }
  template <class K>
  DEVICE static void produce(typename K::Storage& s, const typename K::Params& p, int rank) {
    if (ptx::elect_one()) ::fusible::produce<K>(s, p, rank);
  }
  // Bias and scales of every tile, while the consumers multiply it.
  template <class K>
  DEVICE static void fetch(typename K::Storage& s, const typename K::Params& p) {
    if constexpr (K::kScaleBias) {
      const int lane = threadIdx.x % 32;
      WorkTileReader tiles(s.work);
      uint32_t phase = 0;
      for (WorkTile tile; tiles.next(tile); phase ^= 1) {
        barrier_wait(&s.epilogue.empty, phase ^ 1);
        ::fusible::fill(s.epilogue.stage, p.epilogue, tile, lane);
        barrier_arrive(&s.epilogue.full);
      }
    }
  }
};

// Groups whose tokens stand in blocks of 128 (BlockedTokens): a group starts with a block, and its number is that of
// the blocks before it.
struct BlockedGroups : TokenGroups {
  template <class K>
  DEVICE static void fill(typename K::Storage& s, const typename K::Params& p, int lane) {
    K::Scheduler::fill(s.groups, p.shape, lane);
    int before = 0;
    for (int base = 0; base < p.shape.sizes.groups; base += 32) {
      const int group = base + lane;
      const bool exists = group < p.shape.sizes.groups;
      const int blocks = exists ? (s.groups.tokens[group] + K::kTileK - 1) / K::kTileK : 0;
      const int end = before + scan(blocks, lane);
      if (exists) s.groups.start[group] = end - blocks;
      before = __shfl_sync(~0u, end, 31);
    }
  }
};

}  // namespace fusible
