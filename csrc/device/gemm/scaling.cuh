// SPDX-License-Identifier: Apache-2.0
// Scales of quantised operands: their way into shared memory, and the factors of a consumer.
//
// The depth of a stage is one block of scales, 128 values. A unit is the product of 64 rows and 128 columns over one
// stage; the factor of its element is the scale of the row times that of the column.
//   1D2D  each row of A has a scale for each block, each 128 rows of a weight have one
//   1D1D  each row of A and of B has a scale for each block
#pragma once
#include "device/epilogue/epilogue.cuh"
#include "device/gemm/work_queue.cuh"
#include "device/ptx/tma.cuh"
#include "kernels/scaled/scaled_params.h"

namespace fusible {

constexpr int kUnitColumns = 128;

// The producer has nothing to do for scales that copy engines load, or for none.
template <class K>
struct NothingToPut {
  DEVICE NothingToPut(const typename K::Params&, const WorkTile&) {}
  DEVICE void put(typename K::Storage&, int, bool) {}
};

// Scaling of 16-bit operands: none.
struct NoScaling {
  static constexpr bool kScaled = false, kScalesColumns = false;
  template <class K>
  using Putting = NothingToPut<K>;
  template <class P>
  using Params = P;
  template <int kTileM, int kTileN, int kStages>
  struct Stages {};
};

// The scales of the rows of A that a thread has in its accumulators.
template <class K>
struct RowFactors {
  float values[K::kRowBlocks][2];  // upper and lower rows
  DEVICE void read(const float* of_tile, int consumer, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < K::kRowBlocks; ++i)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower)
        values[i][lower] = of_tile[i * 128 + consumer * 64 + warp * 16 + lane / 4 + lower * 8];
  }
};

// acc = x * factor, or acc += x * factor.
template <bool kFirst>
DEVICE void promote_one(float& acc, float x, float factor) {
  if constexpr (kFirst) acc = x * factor;
  else acc = fmaf(x, factor, acc);
}

// Promotes a unit; factors are those of the upper and of the lower rows.
template <bool kFirst>
DEVICE void promote_rows(float (&acc)[64], const float (&part)[64], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) promote_one<kFirst>(acc[i], part[i], factors[i % 4 / 2]);
}

struct Scaling1D2D {
  static constexpr bool kScaled = true, kScalesColumns = false;
  template <class P>
  using Params = Params1D2D<P>;
  template <int kTileM, int kTileN, int kStages>
  struct Stages {
    static_assert(kTileM == 128 && kTileN == 2 * kUnitColumns, "a box of scales of rows, two of weights");
    static constexpr uint32_t kBytes = kRowScalesBox * sizeof(float);  // of a stage
    alignas(128) float a[kStages][160];
    float2 b[kStages];  // of a weight's first and last 128 rows in the tile
  };
  template <class P>
  DEVICE static void prefetch_maps(const P& p) {
    tma::prefetch_map(&p.a_scales);
  }
  template <class S, class P>
  DEVICE static void copy(S& s, const P& p, int stage, int block, const WorkTile& tile) {
    const int first = tile.tokens_start + tile.row;
    tma::load(&p.a_scales, &s.full[stage], s.scales.a[stage], first - shift(first), block);
  }
  // The distance of this token's scale from the start of the box.
  DEVICE static int shift(int token) { return token & 3; }

  // Used by the producer's thread, through a tile: it loads the scales of the weights a stage ahead. Consumers doing so
  // would wait for memory between two products.
  template <class K>
  class Putting {
   public:
    DEVICE Putting(const typename K::Params& p, const WorkTile& tile)
        : next_(p.b_scales.data + tile.group * p.b_scales.group +
                (tile.idle ? 0 : tile.column) * p.b_scales.tile_step * p.b_scales.row),
          step_(p.b_scales.column),
          second_(has_second(p, tile) ? p.b_scales.unit_step * p.b_scales.row : 0) {
      fetch();
    }
    // Before the stage's arrival.
    DEVICE void put(typename K::Storage& s, int stage, bool more) {
      s.scales.b[stage] = scales_;
      next_ += more ? step_ : 0;
      fetch();
    }

   private:
    DEVICE static bool has_second(const typename K::Params& p, const WorkTile& tile) {
      return !tile.idle && !(p.shape.narrow_end && tile.column == p.shape.columns - 1);
    }
    DEVICE void fetch() {
      scales_.x = __ldg(next_);
      scales_.y = __ldg(next_ + second_);
    }
    const float* next_;
    int64_t step_, second_;
    float2 scales_{};
  };
  // Used by a consumer, through a tile.
  template <class K>
  class Factors {
   public:
    explicit DEVICE Factors(const WorkTile& tile) : shift_(shift(tile.tokens_start + tile.row)) {}
    DEVICE void read(const typename K::Storage& s, int stage, int consumer, int warp, int lane) {
      rows_.read(s.scales.a[stage] + shift_, consumer, warp, lane);
      weight_ = s.scales.b[stage];
    }
    DEVICE void begin_unit(int unit, const typename K::Storage&, int, int) {
      const float weight = unit == 0 ? weight_.x : weight_.y;
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) factor_[lower] = rows_.values[0][lower] * weight;
    }
    template <bool kFirst>
    DEVICE void promote(float (&acc)[64], const float (&part)[64], const typename K::Storage&, int, int, int) const {
      promote_rows<kFirst>(acc, part, factor_);
    }

   private:
    int shift_;
    RowFactors<K> rows_;
    float2 weight_;
    float factor_[2];
  };
};

struct Scaling1D1D {
  static constexpr bool kScaled = true, kScalesColumns = false;
  template <class K>
  using Putting = NothingToPut<K>;
  template <class P>
  using Params = Params1D1D<P>;
  template <int kTileM, int kTileN, int kStages>
  struct Stages {
    static constexpr uint32_t kBytes = (kTileM + kTileN) * sizeof(float);
    alignas(128) float a[kStages][kTileM];
    alignas(128) float b[kStages][kTileN];
  };
  template <class P>
  DEVICE static void prefetch_maps(const P& p) {
    tma::prefetch_map(&p.a_scales);
    tma::prefetch_map(&p.b_scales);
  }
  template <class S, class P>
  DEVICE static void copy(S& s, const P& p, int stage, int block, const WorkTile& tile) {
    constexpr int kTileN = sizeof(s.scales.b[0]) / sizeof(float);
    tma::load(&p.a_scales, &s.full[stage], s.scales.a[stage], tile.row, tile.tokens_start + block);
    tma::load(&p.b_scales, &s.full[stage], s.scales.b[stage], tile.column * kTileN, tile.tokens_start + block);
  }

  template <class K>
  class Factors {
   public:
    explicit DEVICE Factors(const WorkTile&) {}
    DEVICE void read(const typename K::Storage& s, int stage, int consumer, int warp, int lane) {
      rows_.read(s.scales.a[stage], consumer, warp, lane);
    }
    // Called while the unit is multiplied. Both units of a tall tile have the same column factors.
    DEVICE void begin_unit(int unit, const typename K::Storage& s, int stage, int lane) {
      const float* columns = columns_of(unit, s, stage, lane);
      if (unit > 0) return;
#pragma unroll
      for (int vector = 0; vector < kAhead; ++vector) ahead_[vector] = pair_of(columns, vector);
    }
    template <bool kFirst>
    DEVICE void promote(float (&acc)[64], const float (&part)[64], const typename K::Storage& s, int stage, int unit,
                        int lane) const {
      const float* columns = columns_of(unit, s, stage, lane);
      const float (&rows)[2] = rows_.values[K::kUnitsAreRows ? unit : 0];
#pragma unroll
      for (int vector = 0; vector < kUnitColumns / 8; ++vector) {
        const float2 pair = vector < kAhead ? ahead_[min(vector, kAhead)] : pair_of(columns, vector);
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int i = vector * 4 + lower * 2;
          promote_one<kFirst>(acc[i], part[i], rows[lower] * pair.x);
          promote_one<kFirst>(acc[i + 1], part[i + 1], rows[lower] * pair.y);
        }
      }
    }

   private:
    static constexpr int kAhead = K::kUnitsAreRows ? 8 : 0;  // vectors; registers allow no more
    DEVICE static const float* columns_of(int unit, const typename K::Storage& s, int stage, int lane) {
      return s.scales.b[stage] + (K::kUnitsAreRows ? 0 : unit) * kUnitColumns + lane % 4 * 2;
    }
    DEVICE static float2 pair_of(const float* columns, int vector) {
      return *reinterpret_cast<const float2*>(columns + vector * 8);
    }
    RowFactors<K> rows_;
    float2 ahead_[kAhead + 1];
  };
};

}  // namespace fusible
