// SPDX-License-Identifier: Apache-2.0
// The producer for groups of different shapes: warp 0 through the maps of the group, or warps 0 and 1 by ordinary
// loads.
#pragma once
#include "device/gemm/cp_async_copy.cuh"
#include "device/gemm/mainloop.cuh"
#include "device/ptx/map_update.cuh"

namespace fusible {

// The groups policy of GroupedGemmKernel for ragged groups; TokenGroups (kernels/gemm/grouped_gemm.cuh) is the usual
// one.
struct RaggedGroups {
  template <TileVariant kVariant, bool kRaggedRows>
  using Scheduler = RaggedScheduler<kVariant>;
  using Table = RaggedTable;
  template <class EpilogueParams>
  using Params = EpilogueParams;
  static constexpr int kProducers = 64;  // arrivals at a stage
  static constexpr bool kShortEnd = false;

  template <class K>
  DEVICE static void fill(typename K::Storage& s, const RaggedParams& p, int lane) {
    K::Scheduler::fill(s.groups, p.groups, p.shape.sizes.groups, lane);
  }

  // Warp 0.
  template <class K>
  DEVICE static void produce(typename K::Storage& s, const RaggedParams& p, int) {
    const int lane = threadIdx.x % 32;
    typename K::Scheduler tiles(s.groups, s.work, p.shape, lane);
    PipelineState<K::kStages> state;
    int acquired = -1;
    const auto find = [&](WorkTile& tile) {  // lane 0
      tiles.next(tile);
      if (tile.group < 0 || tile.group == acquired) return;
      acquired = tile.group;
      const int no_tma = s.groups.no_tma[acquired];
      if (!(no_tma & kNoTmaA)) map_update::acquire(maps_of(p, acquired));
      if (!(no_tma & kNoTmaB)) map_update::acquire(maps_of(p, acquired) + 1);
    };
    WorkTile tile, following;
    if (lane == 0) find(tile);
    for (share(tile); tile.group >= 0; tile = following) {
      const int no_tma = s.groups.no_tma[tile.group] & (kNoTmaA | kNoTmaB), rows = (tile.rows + 63) / 64;
      const uint32_t bytes =
          (no_tma & kNoTmaA ? 0 : rows * kBlockBytes) + (no_tma & kNoTmaB ? 0 : K::kTileN * kSwizzleBytes);
      const CUtensorMap* maps = maps_of(p, tile.group);
      const int blocks = k_blocks_of<K>(tile, p);
      for (int block = 0; block < blocks; ++block) {
        if (lane == 0 && block > 0 && block == blocks - 1) find(following);
        barrier_wait(&s.empty[state.stage], state.phase ^ 1);
        uint64_t* full = &s.full[state.stage];
        if (no_tma) copy_share<K>(s, p, tile, no_tma, state.stage, block, lane);
        if (lane == 0) {
          barrier_arrive_expecting(full, bytes);
          if (!(no_tma & kNoTmaA)) {
            for (int i = 0; i < rows; ++i)
              K::A::copy(Unicast{maps, full}, s.stages.a[state.stage], i, block * K::kTileK, tile);
          }
          if (!(no_tma & kNoTmaB)) {
            for (int i = 0; i < K::B::kPieces; ++i)
              K::B::copy(Unicast{maps + 1, full}, s.stages.b[state.stage], i, block * K::kTileK, tile);
          }
          if (!no_tma) barrier_arrive(full, kProducers - 1);  // for all the others
          if (block == 0) tiles.request();
        } else if (no_tma) {
          barrier_arrive(full);
        }
        state.advance();
      }
      if (lane == 0 && blocks == 1) find(following);
      share(following);
    }
  }

  // Run by warp 1: copies its share of operands without maps, then bias and factors.
  template <class K>
  DEVICE static void fetch(typename K::Storage& s, const RaggedParams& p) {
    const int lane = threadIdx.x % 32;
    WorkTileReader tiles(s.work);
    PipelineState<K::kStages> state;
    uint32_t phase = 0;
    for (WorkTile tile; tiles.next(tile); phase ^= 1) {
      const int no_tma = s.groups.no_tma[tile.group] & (kNoTmaA | kNoTmaB), blocks = k_blocks_of<K>(tile, p);
      for (int block = 0; no_tma && block < blocks; ++block) {
        barrier_wait(&s.empty[state.stage], state.phase ^ 1);
        copy_share<K>(s, p, tile, no_tma, state.stage, block, 32 + lane);
        barrier_arrive(&s.full[state.stage]);
        state.advance();
      }
      if (!no_tma) skip_ahead(state, blocks);
      barrier_wait(&s.epilogue.empty, phase ^ 1);
      ::fusible::fill(s.epilogue.stage, p.epilogue, tile, lane);
      barrier_arrive(&s.epilogue.full);
    }
  }

  DEVICE static CUtensorMap* maps_of(const RaggedParams& p, int group) { return p.maps + group * 3; }

 private:
  // Shares lane 0's tile with the producer's warp.
  DEVICE static void share(WorkTile& tile) {
    tile.group = __shfl_sync(~0u, tile.group, 0);
    tile.tokens = __shfl_sync(~0u, tile.tokens, 0);
    tile.row = __shfl_sync(~0u, tile.row, 0);
    tile.rows = __shfl_sync(~0u, tile.rows, 0);
    tile.column = __shfl_sync(~0u, tile.column, 0);
  }
  template <int kStages>
  DEVICE static void skip_ahead(PipelineState<kStages>& state, int slots) {
    const int to = state.stage + slots;
    state.phase ^= to / kStages & 1;
    state.stage = to % kStages;
  }

  // Copies a share of one stage of the operands without a map; called by thread `thread` of 64.
  template <class K>
  DEVICE static void copy_share(typename K::Storage& s, const RaggedParams& p, const WorkTile& tile, int no_tma,
                                int stage, int block, int thread) {
    const RaggedGroup& g = p.groups[tile.group];
#pragma unroll 1
    for (int operand = kNoTmaA; operand <= kNoTmaB; ++operand) {
      if (!(no_tma & operand)) continue;
      const bool a = operand == kNoTmaA;
      const NoTmaMatrix matrix =
          a ? no_tma_matrix<typename K::A>(p.a_data, p.a_elements, p.edges, g.a, g.a_pitch, g.m, g.k)
            : no_tma_matrix<typename K::B>(p.b_data, p.b_elements, p.edges + 2, g.b, g.b_pitch, g.n, g.k);
      uint8_t* const to = a ? s.stages.a[stage] : s.stages.b[stage];
      const int lines = a ? (tile.rows + 63) / 64 * 64 : K::kTileN, first = a ? tile.row : tile.column * K::kTileN;
      if (has_pairs(matrix)) cp_async_pairs<kProducers>(matrix, to, lines, first, block * K::kTileK, thread);
      else copy_shifted<kProducers>(matrix, to, lines, first, block * K::kTileK, thread);
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    ptx::async_proxy_fence();
  }
  template <class Major>
  DEVICE static NoTmaMatrix no_tma_matrix(const void* data, int64_t elements, const uint4* edges, int64_t start,
                                          int pitch, int size, int depth) {
    const auto* begin = static_cast<const uint16_t*>(data);
    constexpr bool kKMajor = Major::kTranspose == 0;
    return {begin,  begin + elements, edges, begin + start, pitch, kKMajor ? size : depth, kKMajor ? depth : size,
            kKMajor};
  }
};

}  // namespace fusible
