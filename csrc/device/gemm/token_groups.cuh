// SPDX-License-Identifier: Apache-2.0
// Groups that are rows of a token buffer, or its depth. RaggedGroups (ragged_producer.cuh) have shapes of their own.
#pragma once
#include "device/gemm/arrivals.cuh"
#include "device/gemm/mainloop.cuh"

namespace fusible {

struct TokenGroups {
  template <TileVariant kVariant, bool kRaggedRows>
  using Scheduler = TileScheduler<kVariant, kRaggedRows>;
  using Table = GroupTable;
  template <class EpilogueParams>
  using Params = EpilogueParams;
  static constexpr int kProducers = 1;
  static constexpr bool kShortEnd = false;  // whether the last block of the depth may be one step of a product
  template <class K>
  DEVICE static void fill(typename K::Storage& s, const typename K::Params& p, int lane) {
    K::Scheduler::fill(s.groups, p.shape, lane);
  }
  template <class K>
  DEVICE static void produce(typename K::Storage& s, const typename K::Params& p, int rank) {
    if (ptx::elect_one()) ::fusible::produce<K>(s, p, rank);
  }
  // The sources of block number `block` of the depth: operand maps, the offset in their depth, and the tile with the
  // coordinate of the group's matrix.
  DEVICE static const CUtensorMap* a(const GemmParams& p, int) { return &p.a; }
  DEVICE static const CUtensorMap* b(const GemmParams& p, int) { return &p.b; }
  template <class K>
  DEVICE static int depth(const GemmParams&, int block) {
    return block * K::kTileK;
  }
  DEVICE static const WorkTile& tile(const GemmParams&, const WorkTile& tile, int) { return tile; }
  DEVICE static bool short_end(const GemmParams&) { return false; }
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

// The same with a second pair of operands: the depth goes on with it.
struct TokenGroupsOfPairs : TokenGroups {
  template <class EpilogueParams>
  using Params = WithSecondPair<EpilogueParams>;
  static constexpr bool kShortEnd = true;
  template <class P>
  DEVICE static bool short_end(const P& p) {
    return p.second.short_end;
  }
  template <class P>
  DEVICE static const CUtensorMap* a(const P& p, int block) {
    return block < p.second.k_blocks ? &p.a : &p.second.a;
  }
  template <class P>
  DEVICE static const CUtensorMap* b(const P& p, int block) {
    return block < p.second.k_blocks ? &p.b : &p.second.b;
  }
  template <class K>
  DEVICE static int depth(const typename K::Params& p, int block) {
    return (block < p.second.k_blocks ? block : block - p.second.k_blocks) * K::kTileK;
  }
  template <class P>
  DEVICE static WorkTile tile(const P& p, WorkTile tile, int block) {
    if (block >= p.second.k_blocks) tile.coordinate = {tile.group, 0};
    return tile;
  }
};

// Groups whose rows another kernel brings meanwhile. A tile waits for the blocks of its rows; of the last one, no row
// behind the groups need be there.
struct ArrivingGroups : TokenGroups {
  template <class EpilogueParams>
  using Params = WithArrivals<EpilogueParams>;
  static constexpr bool kRowsArrive = true;
  // Called by the thread that fetches them, also for the other block of a cluster and for an idle tile.
  template <class P>
  DEVICE static void wait_for_rows(const P& p, const WorkTile& tile) {
    const int first = tile.tokens_start + tile.row, end = first + tile.rows;
    for (int block = first / kArrivalRows; block * kArrivalRows < end; ++block) wait_for_block(p.arrivals, block);
    ptx::async_proxy_fence_global();
  }
};

// Groups whose tokens are stored in blocks of 128 (BlockedTokens). A group starts with a new block; blocks are numbered
// through all groups.
struct BlockedGroups : TokenGroups {
  template <class K>
  DEVICE static void fill(typename K::Storage& s, const typename K::Params& p, int lane) {
    K::Scheduler::fill(s.groups, p.shape, lane);
    const auto blocks_of = [](int64_t tokens) { return (tokens + K::kTileK - 1) / K::kTileK; };
    const auto [first, count] = p.shape.window;
    int before = 0;
    if (first > 0)  // groups behind the end of the buffer have no blocks: they may begin anywhere
      before = static_cast<int>(
          min(sum_before(p.shape.sizes, first, p.shape.tokens, lane, blocks_of), static_cast<int64_t>(p.shape.tokens)));
    for (int base = 0; base < count; base += 32) {
      const int at = base + lane;
      const bool exists = at < count;
      const int blocks = exists ? (s.groups.tokens[at] + K::kTileK - 1) / K::kTileK : 0;
      const int end = before + scan(blocks, lane);
      if (exists) s.groups.start[at] = end - blocks;
      before = __shfl_sync(~0u, end, 31);
    }
  }
};

}  // namespace fusible
