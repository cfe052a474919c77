// Who fills the stages where every group has a shape of its own: warp 0 through the maps of the group, or warps 0 and 1
// by ordinary loads.
#pragma once
#include "device/mainloop.cuh"
#include "device/map_update.cuh"
#include "device/plain_copy.cuh"

namespace fusible {

// What GroupedGemmKernel asks of its groups; TokenGroups (kernels/grouped_gemm.cuh) is the usual one.
struct ShapedGroups {
  template <TileVariant kVariant, bool kRaggedRows>
  using Scheduler = ShapedScheduler<kVariant>;
  using Table = ShapedTable;
  static constexpr int kProducers = 64;  // arrivals at a stage

  template <class K>
  DEVICE static void fill(typename K::Storage& s, const ShapedParams& p, int lane) {
    K::Scheduler::fill(s.groups, p.groups, p.shape.sizes.groups, lane);
  }

  // Warp 0.
  template <class K>
  DEVICE static void produce(typename K::Storage& s, const ShapedParams& p, int) {
    const int lane = threadIdx.x % 32;
    typename K::Scheduler tiles(s.groups, s.tasks, p.shape, lane);
    Ring<K::kStages> ring;
    int acquired = -1;
    const auto find = [&](Tile& tile) {  // lane 0
      tiles.next(tile);
      if (tile.group < 0 || tile.group == acquired) return;
      acquired = tile.group;
      const int plain = s.groups.plain[acquired];
      if (!(plain & kPlainA)) map_update::acquire(maps_of(p, acquired));
      if (!(plain & kPlainB)) map_update::acquire(maps_of(p, acquired) + 1);
    };
    Tile tile, following;
    if (lane == 0) find(tile);
    for (share(tile); tile.group >= 0; tile = following) {
      const int plain = s.groups.plain[tile.group] & (kPlainA | kPlainB), rows = (tile.rows + 63) / 64;
      const uint32_t bytes =
          (plain & kPlainA ? 0 : rows * kBlockBytes) + (plain & kPlainB ? 0 : K::kTileN * kTileK * 2);
      const CUtensorMap* maps = maps_of(p, tile.group);
      const int blocks = k_blocks_of<K>(tile, p);
      for (int block = 0; block < blocks; ++block) {
        if (lane == 0 && block > 0 && block == blocks - 1) find(following);
        barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
        uint64_t* full = &s.full[ring.stage];
        if (plain) copy_share<K>(s, p, tile, plain, ring.stage, block, lane);
        if (lane == 0) {
          barrier_arrive_expecting(full, bytes);
          if (!(plain & kPlainA)) {
            for (int i = 0; i < rows; ++i) K::A::copy(Own{maps, full}, s.stages.a[ring.stage], i, block * kTileK, tile);
          }
          if (!(plain & kPlainB)) {
            for (int i = 0; i < K::B::kPieces; ++i)
              K::B::copy(Own{maps + 1, full}, s.stages.b[ring.stage], i, block * kTileK, tile);
          }
          if (!plain) barrier_arrive(full, kProducers - 1);  // for all the others
          if (block == 0) tiles.request();
        } else if (plain) {
          barrier_arrive(full);
        }
        ring.advance();
      }
      if (lane == 0 && blocks == 1) find(following);
      share(following);
    }
  }

  // Warp 1: its share of what is not reached by maps, then bias and factors.
  template <class K>
  DEVICE static void fetch(typename K::Storage& s, const ShapedParams& p) {
    const int lane = threadIdx.x % 32;
    TileReader tiles(s.tasks);
    Ring<K::kStages> ring;
    uint32_t phase = 0;
    for (Tile tile; tiles.next(tile); phase ^= 1) {
      const int plain = s.groups.plain[tile.group] & (kPlainA | kPlainB), blocks = k_blocks_of<K>(tile, p);
      for (int block = 0; plain && block < blocks; ++block) {
        barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
        copy_share<K>(s, p, tile, plain, ring.stage, block, 32 + lane);
        barrier_arrive(&s.full[ring.stage]);
        ring.advance();
      }
      if (!plain) skip_ahead(ring, blocks);
      barrier_wait(&s.affine.empty, phase ^ 1);
      ::fusible::fill(s.affine.stage, p.affine, tile, lane);
      barrier_arrive(&s.affine.full);
    }
  }

  DEVICE static CUtensorMap* maps_of(const ShapedParams& p, int group) { return p.maps + group * 3; }

 private:
  // What the producer's warp must know of lane 0's tile.
  DEVICE static void share(Tile& tile) {
    tile.group = __shfl_sync(~0u, tile.group, 0);
    tile.tokens = __shfl_sync(~0u, tile.tokens, 0);
    tile.row = __shfl_sync(~0u, tile.row, 0);
    tile.rows = __shfl_sync(~0u, tile.rows, 0);
    tile.column = __shfl_sync(~0u, tile.column, 0);
  }
  template <int kStages>
  DEVICE static void skip_ahead(Ring<kStages>& ring, int slots) {
    const int to = ring.stage + slots;
    ring.phase ^= to / kStages & 1;
    ring.stage = to % kStages;
  }

  // One stage of what the group has no map for, by number `thread` of 64.
  template <class K>
  DEVICE static void copy_share(typename K::Storage& s, const ShapedParams& p, const Tile& tile, int plain, int stage,
                                int block, int thread) {
    const ShapedGroup& g = p.groups[tile.group];
#pragma unroll 1
    for (int operand = kPlainA; operand <= kPlainB; ++operand) {
      if (!(plain & operand)) continue;
      const bool a = operand == kPlainA;
      const PlainMatrix matrix =
          a ? plain_matrix<typename K::A>(p.a_data, p.a_elements, p.edges, g.a, g.a_pitch, g.m, g.k)
            : plain_matrix<typename K::B>(p.b_data, p.b_elements, p.edges + 2, g.b, g.b_pitch, g.n, g.k);
      uint8_t* const to = a ? s.stages.a[stage] : s.stages.b[stage];
      const int lines = a ? (tile.rows + 63) / 64 * 64 : K::kTileN, first = a ? tile.row : tile.column * K::kTileN;
      if (has_pairs(matrix)) copy_pairs<kProducers>(matrix, to, lines, first, block * kTileK, thread);
      else copy_plain<kProducers>(matrix, to, lines, first, block * kTileK, thread);
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    ptx::async_proxy_fence();
  }
  template <class Major>
  DEVICE static PlainMatrix plain_matrix(const void* data, int64_t elements, const uint4* edges, int64_t start,
                                         int pitch, int size, int depth) {
    const auto* begin = static_cast<const uint16_t*>(data);
    constexpr bool kKMajor = Major::kTranspose == 0;
    return {begin,  begin + elements, edges, begin + start, pitch, kKMajor ? size : depth, kKMajor ? depth : size,
            kKMajor};
  }
};

}  // namespace fusible
