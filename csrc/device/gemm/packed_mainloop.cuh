// SPDX-License-Identifier: Apache-2.0
// The loop over the depth with packed weights: a swap_ab tile whose left operand is decoded in registers.
//
// A step's weights are decoded while the product of the step before is under way, from a stage to the next one too.
// They are read two steps at a time, a step before they are decoded. ptxas accepts products that are under way while a
// loop begins anew if what they read is made before a wait.
#pragma once
#include "device/gemm/mainloop.cuh"
#include "device/gemm/packed_operands.cuh"

namespace fusible {

constexpr int kPackedTokenStep = 64;  // of the widths of products

// Factors of the weights' scales in each stage, and where they come from.
struct PackedScaling {
  static constexpr bool kScaled = false, kScalesColumns = false;
  template <class K>
  using Putting = NothingToPut<K>;
  template <class P>
  using Params = WithPackedWeights<P>;
  template <int kTileM, int kTileN, int kStages>
  struct Stages {
    alignas(16) uint32_t factors[kStages][kTileN * 2];
  };
};

// Calls body(0), body(1), ..., each with a constant.
template <class Body>
DEVICE void each_step(Body body) {
  [&]<int... kSteps>(std::integer_sequence<int, kSteps...>)
      INLINE { (body(std::integral_constant<int, kSteps>()), ...); }(std::make_integer_sequence<int, 4>());
}

template <class K, int kTokens>
DEVICE void multiply_step(float (&acc)[K::kTileM / 2], const uint32_t (&a)[4], const uint8_t* tokens, int step,
                          bool accumulate) {
  wgmma_registers(reinterpret_cast<float (&)[kTokens / 2]>(acc), a,
                  K::A::descriptor(tokens) + step * (K::A::kStep / 16), accumulate);
}

// acc = weights x tokens over the first pair of operands, for the first kTokens of the tile's tokens.
template <class K, int kTokens>
DEVICE void multiply_decoded(float (&acc)[K::kTileM / 2], typename K::Storage& s, PipelineState<K::kStages>& state,
                             int blocks, typename K::B::Lane& mine, int lane) {
  static_assert(K::kStepsK == 4);
  uint32_t a[4];
  barrier_wait(&s.full[state.stage], state.phase);
  mine.template read<0>(s.stages.b[state.stage], s.scales.factors[state.stage]);
  mine.template decode<0>(a);
  int stage = 0;
  for (int block = 0; block < blocks; ++block) {
    const int before = stage;
    stage = state.stage;
    state.advance();
    each_step([&](auto step) INLINE {
      wgmma_fence();
      multiply_step<K, kTokens>(acc, a, s.stages.a[stage], step.value, (block | step.value) != 0);
      wgmma_commit();
      if (step.value == 1 && block > 0) {
        __syncwarp();
        release<K>(s, before, lane);
      }
      // Reads follow the decoding: a wait for earlier reads would wait for them too.
      uint32_t next[4];
      mine.template decode<(step.value + 1) % 4>(next);
      if (step.value == 0) mine.template read<1>(s.stages.b[stage], s.scales.factors[stage]);
      if (step.value == 2 && block + 1 < blocks) {
        barrier_wait(&s.full[state.stage], state.phase);
        mine.template read<0>(s.stages.b[state.stage], s.scales.factors[state.stage]);
      }
      wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = next[i];
    });
  }
  wgmma_wait<0>();
  __syncwarp();
  release<K>(s, stage, lane);
}

// Adds the product of the second pair, one block.
template <class K, int kTokens>
DEVICE void add_second(float (&acc)[K::kTileM / 2], typename K::Storage& s, PipelineState<K::kStages>& state,
                       uint32_t (&a)[K::kStepsK][4], bool short_end, int lane) {
  const auto add = [&](auto steps) INLINE {
#pragma unroll
    for (int step = 0; step < steps.value; ++step) K::B::Lane::arrange_second(a[step]);
    barrier_wait(&s.full[state.stage], state.phase);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps.value; ++step)
      multiply_step<K, kTokens>(acc, a[step], s.stages.a[state.stage], step, true);
    wgmma_commit();
    wgmma_wait<0>();
  };
  if (short_end) add(std::integral_constant<int, 1>());
  else add(std::integral_constant<int, K::kStepsK>());
  release<K>(s, state.stage, lane);
  state.advance();
}

// All tokens of the tile, over both pairs.
template <class K, int kTokens = kPackedTokenStep>
DEVICE void multiply_packed(float (&acc)[K::kTileM / 2], typename K::Storage& s, PipelineState<K::kStages>& state,
                            const typename K::Params& p, const WorkTile& tile, int consumer, int warp, int lane) {
  if constexpr (kTokens < K::kTileM)
    if (tile.rows > kTokens)
      return multiply_packed<K, kTokens + kPackedTokenStep>(acc, s, state, p, tile, consumer, warp, lane);
  typename K::B::Lane mine(consumer, warp, lane);
  uint32_t second[K::kStepsK][4];  // on their way while the first pair is multiplied
#pragma unroll
  for (int step = 0; step < K::kStepsK; ++step) mine.fetch_second(p.packed, tile, step, second[step]);
  multiply_decoded<K, kTokens>(acc, s, state, p.second.k_blocks, mine, lane);
  if (p.packed.second_k) add_second<K, kTokens>(acc, s, state, second, p.second.short_end, lane);
}

}  // namespace fusible
