// SPDX-License-Identifier: Apache-2.0
// The loop over the depth of e4m3 operands. Their products keep 13 fraction bits, so each stage is summed apart, and
// its sum times its scales is added in fp32.
//
// A consumer has two units of 64 rows x 128 columns: two blocks of rows, or the halves of a tile of 256 columns. They
// are multiplied in turn, into the same registers. While one consumer adds, the other one multiplies. A finished tile
// stays in its registers until the next tile's first product is under way.
#pragma once
#include "device/gemm/hand_over.cuh"
#include "device/gemm/mainloop.cuh"
#include "device/ptx/wgmma.cuh"

namespace fusible {

constexpr int kUnits = 2;

// acc = A B over all of k, for the first kUsed of the consumer's units. `meanwhile` is called when the first product is
// under way, and before `acc` is written.
template <class K, int kUsed, class Meanwhile>
DEVICE void multiply_scaled(float (&acc)[kUnits][64], typename K::Storage& s, PipelineState<K::kStages>& state,
                            const WorkTile& tile, const typename K::Params& p, int consumer, int warp, int lane,
                            Meanwhile meanwhile) {
  using A = typename K::A;
  using B = typename K::B;
  using Factors = typename K::Scaling::template Factors<K>;
  const int blocks = k_blocks_of<K>(tile, p);
  constexpr bool kInStage = A::kRaggedDepth;  // scales are read from the stage until its end
  constexpr bool kOverlaps = !K::kScaleBias || K::Scaling::kScalesColumns;  // there are registers for it
  if constexpr (!kOverlaps) meanwhile();
  Factors factors(tile);
  float part[64];
  const auto stage = [&](auto steps, auto first) INLINE {
    barrier_wait(&s.full[state.stage], state.phase);
#pragma unroll
    for (int unit = 0; unit < kUsed; ++unit) {
      const uint8_t* a =
          s.stages.a[state.stage] + (consumer + (K::kUnitsAreRows ? unit : 0) * kConsumers) * kBlockBytes;
      const uint8_t* b = s.stages.b[state.stage] + (K::kUnitsAreRows ? 0 : unit) * kUnitColumns * kSwizzleBytes;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < steps.value; ++step)
        wgmma_e4m3(part, A::descriptor(a) + step * (A::kStep / 16), B::descriptor(b) + step * (B::kStep / 16),
                   step != 0);
      wgmma_commit();
      if (first.value && kOverlaps && unit == 0) meanwhile();
      if (unit == 0) factors.read(s, state.stage, consumer, warp, lane);
      factors.begin_unit(unit, s, state.stage, lane);
      wgmma_wait<0>();
      if (!kInStage && unit == kUsed - 1) release<K>(s, state.stage, lane);
      factors.template promote<first.value>(acc[unit], part, s, state.stage, unit, lane);
    }
    if constexpr (kInStage) {
      __syncwarp();
      release<K>(s, state.stage, lane);
    }
    state.advance();
  };
  constexpr std::integral_constant<int, K::kStepsK> kAll;
  if constexpr (A::kRaggedDepth) {
    const int rest = tile.tokens - (blocks - 1) * K::kTileK;  // of the last block
    if (blocks > 1) {
      stage(kAll, std::true_type());
    } else {
      if constexpr (kOverlaps) meanwhile();
#pragma unroll
      for (int i = 0; i < kUnits * 64; ++i) acc[i / 64][i % 64] = 0.f;
      if (blocks == 0) return;  // an empty group's are zeros
    }
    for (int block = 1; block < blocks - 1; ++block) stage(kAll, std::false_type());
    if (rest > 3 * A::kStepK) stage(std::integral_constant<int, 4>(), std::false_type());
    else if (rest > 2 * A::kStepK) stage(std::integral_constant<int, 3>(), std::false_type());
    else if (rest > A::kStepK) stage(std::integral_constant<int, 2>(), std::false_type());
    else stage(std::integral_constant<int, 1>(), std::false_type());
  } else {
    stage(kAll, std::true_type());
    for (int block = 1; block < blocks; ++block) stage(kAll, std::false_type());
  }
}

template <class K>
DEVICE void consume_scaled(typename K::Storage& s, const typename K::Params& p, int consumer) {
  static_assert(K::kRowBlocks * K::kTileN == kUnits * kUnitColumns, "two units for each consumer");
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  WorkTileReader tiles(s.work);
  PipelineState<K::kStages> state;
  PipelineState<K::Layout::kSlots> slot;
  uint32_t epilogue_phase = 0;
  float acc[kUnits][64];
  auto& rows = reinterpret_cast<float (&)[K::kRowBlocks][K::kTileN / 2]>(acc);
  int complete = 0;  // blocks of rows of the tile before, still in their registers
  const auto end_tile_before = [&] {
    if (complete == 0) return;
    hand_over<K, 0>(s, p, rows[0], consumer, warp, lane, slot, epilogue_phase);
    if constexpr (K::kRowBlocks == 2)
      if (complete == 2) hand_over<K, 1>(s, p, rows[1], consumer, warp, lane, slot, epilogue_phase);
    end_tile<K>(s, epilogue_phase);
  };
  for (WorkTile tile; tiles.next(tile);) {
    const int mine = K::row_blocks(tile, consumer);
    if (mine == 0) {
      end_tile_before();
      skip<K>(s, state, k_blocks_of<K>(tile, p), lane);
      pass_over_tile<K>(s, epilogue_phase);
    } else if (K::kUnitsAreRows ? mine == 1 : K::narrow(tile, p)) {
      multiply_scaled<K, 1>(acc, s, state, tile, p, consumer, warp, lane, end_tile_before);
    } else {
      multiply_scaled<K, 2>(acc, s, state, tile, p, consumer, warp, lane, end_tile_before);
    }
    complete = mine;
  }
  end_tile_before();
}

}  // namespace fusible
