// SPDX-License-Identifier: Apache-2.0
// 1D1D with scales that are powers of two: those of columns are 16 bits in shared memory.
//
// A power of two, and NaN, are the upper half of a float. One warp loads the scales of columns a stage ahead and leaves
// their halves in the stage. ldmatrix hands eight neighbouring ones to a warp as accumulators have them: two to each
// thread. So a consumer needs 4 loads of 16 bytes a thread for 128 columns, where floats need 16 of 8 bytes, and they
// are over before the product is.
#pragma once
#include "device/scaling.cuh"

namespace fusible {

struct PowerOfTwoScaling1D1D : Scaling1D1D {
  static constexpr bool kPacksColumns = true, kStaggers = false;
  template <class P>
  using Params = PowerOfTwoParams1D1D<P>;
  template <int kTileM, int kTileN, int kStages>
  struct Stages {
    static constexpr uint32_t kBytes = kTileM * sizeof(float);  // that a bulk copy brings
    alignas(128) float a[kStages][kTileM];
    alignas(128) uint2 b[kStages][kTileN / 4];  // 16 bits for each column
  };
  template <class P>
  DEVICE static void prefetch_maps(const P& p) {
    tma::prefetch_map(&p.a_scales);
  }
  template <class S, class P>
  DEVICE static void copy(S& s, const P& p, int stage, int block, const WorkTile& tile) {
    tma::load(&p.a_scales, &s.full[stage], s.scales.a[stage], tile.row, tile.tokens_start + block);
  }

  // Of all tiles, by one warp.
  template <class K>
  DEVICE static void pack_columns(typename K::Storage& s, const typename K::Params& p) {
    constexpr int kVectors = K::kTileN / 128;  // of four columns, of a lane
    const int lane = threadIdx.x % 32;
    WorkTileReader tiles(s.work);
    PipelineState<K::kStages> state;
    for (WorkTile tile; tiles.next(tile);) {
      const int blocks = k_blocks_of<K>(tile, p), column = tile.column * K::kTileN + lane * 4;
      const float* next = p.column_scales + tile.tokens_start * int64_t{p.columns} + column;
      float4 scales[kVectors];
      const auto fetch = [&](bool more) INLINE {
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
          scales[i] = more && !tile.idle && column + i * 128 < p.columns
                          ? __ldg(reinterpret_cast<const float4*>(next + i * 128))
                          : float4{};
        next += p.columns;
      };
      fetch(blocks > 0);
      for (int block = 0; block < blocks; ++block) {
        barrier_wait(&s.empty[state.stage], state.phase ^ 1);
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
          s.scales.b[state.stage][i * 32 + lane] = {upper_halves(scales[i].x, scales[i].y),
                                                    upper_halves(scales[i].z, scales[i].w)};
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.full[state.stage]);
        fetch(block + 1 < blocks);
        state.advance();
      }
    }
  }

  template <class K>
  class Factors {
   public:
    static constexpr bool kReadsToTheEnd = K::kUnitsAreRows;
    explicit DEVICE Factors(const WorkTile&) {}
    DEVICE void read(const typename K::Storage& s, int stage, int consumer, int warp, int lane) {
      rows_.read(s.scales.a[stage], consumer, warp, lane);
    }
    // While the unit is multiplied.
    DEVICE void begin_unit(int unit, const typename K::Storage& s, int stage, int lane) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(i, unit, s, stage, lane);
    }
    template <bool kFirst>
    DEVICE void promote(float (&acc)[64], const float (&part)[64], const typename K::Storage& s, int stage, int unit,
                        int lane) {
      const float (&rows)[2] = rows_.values[K::kUnitsAreRows ? unit : 0];
#pragma unroll
      for (int i = kAhead; i < 4; ++i) load(i, unit, s, stage, lane);
#pragma unroll
      for (int vector = 0; vector < kUnitColumns / 8; ++vector) {
        const float2 pair = ptx::unpack<__nv_bfloat16>(columns_[vector / 4][vector % 4]);
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int i = vector * 4 + lower * 2;
          promote_one<kFirst>(acc[i], part[i], rows[lower] * pair.x);
          promote_one<kFirst>(acc[i + 1], part[i + 1], rows[lower] * pair.y);
        }
      }
    }

   private:
    static constexpr int kAhead = K::kUnitsAreRows ? 3 : 4;  // loads; there are no registers for more
    DEVICE void load(int i, int unit, const typename K::Storage& s, int stage, int lane) {
      const uint32_t first = ptx::smem_address(s.scales.b[stage]) + (K::kUnitsAreRows ? 0 : unit) * kUnitColumns * 2;
      ptx::load_matrix_x4(columns_[i], first + lane / 8 * 16 + i * 64);
    }
    RowFactors<K> rows_;
    uint32_t columns_[4][4];  // of vectors of eight columns, this thread's two
  };

 private:
  DEVICE static uint32_t upper_halves(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
  }
};

// The same, where the second consumer begins no stage before the first one has multiplied its first unit: one adds
// while the other multiplies.
struct StaggeredScaling1D1D : PowerOfTwoScaling1D1D {
  static constexpr bool kStaggers = true;
  template <int kTileM, int kTileN, int kStages>
  struct Stages : PowerOfTwoScaling1D1D::Stages<kTileM, kTileN, kStages> {
    uint64_t begun[kStages];
  };
};

}  // namespace fusible
