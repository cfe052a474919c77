// SPDX-License-Identifier: Apache-2.0
// Tiles with A and B swapped (swap_ab): the product of weights [tile_n, depth] and tokens [up to tile_m, depth],
// transposed when it is stored.
//
// The left operand of a product has 64 rows, the right one any multiple of 8 columns, of which these tiles use
// multiples of 16. So where the weights are on the left, the tokens of a tile are rounded up to 16 rather than to 64,
// and a group's tokens can be shared evenly among its tiles (tile_scheduler.cuh). Each consumer has half of the
// weights, in blocks of 64, and all tokens.
#pragma once
#include "device/gemm/mainloop.cuh"

namespace fusible {

constexpr int kTokenStep = 16;

template <class K>
constexpr int kWeightBlocks = K::kTileN / (64 * kConsumers);  // of a consumer
template <class K>
using SwapAbAccumulators = float[kWeightBlocks<K>][K::kTileM / 2];

// The 64 of a tile's weights that a consumer's block `i` has: neighbours, or as many gates as ups of the same columns.
template <class K>
DEVICE int weight_block(int consumer, int i) {
  return K::B::kHalves ? consumer + i * kConsumers : consumer * kWeightBlocks<K> + i;
}

// The first kTokens of the tile's tokens, over all of k; of the last block, where it may be short, the steps that
// exist.
template <class K, int kTokens>
DEVICE void multiply_tokens(SwapAbAccumulators<K>& acc, typename K::Storage& s, PipelineState<K::kStages>& state,
                            int blocks, bool short_end, int consumer, int lane) {
  using Tokens = typename K::A;
  using Weights = typename K::B;
  const auto multiply_block = [&](auto steps, int block) INLINE {
    barrier_wait(&s.full[state.stage], state.phase);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps.value; ++step)
#pragma unroll
      for (int i = 0; i < kWeightBlocks<K>; ++i)
        wgmma<typename K::T, Weights::kTranspose, Tokens::kTranspose>(
            reinterpret_cast<float (&)[kTokens / 2]>(acc[i]),
            Weights::descriptor(s.stages.b[state.stage] + weight_block<K>(consumer, i) * kBlockBytes) +
                step * (Weights::kStep / 16),
            Tokens::descriptor(s.stages.a[state.stage]) + step * (Tokens::kStep / 16), (block | step) != 0);
    wgmma_commit();
    wgmma_wait<0>();
    release<K>(s, state.stage, lane);
    state.advance();
  };
  const int whole = blocks - (K::Groups::kShortEnd && short_end ? 1 : 0);
  for (int block = 0; block < whole; ++block) multiply_block(std::integral_constant<int, K::kStepsK>(), block);
  if constexpr (K::Groups::kShortEnd)
    if (short_end) multiply_block(std::integral_constant<int, 1>(), whole);
}
// All tokens of the tile: the narrowest product that has them.
template <class K, int kTokens = kTokenStep>
DEVICE void multiply_swap_ab(SwapAbAccumulators<K>& acc, typename K::Storage& s, PipelineState<K::kStages>& state,
                             int tokens, int blocks, bool short_end, int consumer, int lane) {
  constexpr int kMore = kTokens + kTokenStep;
  if constexpr (kTokens < K::kTileM)
    if (tokens > kTokens) return multiply_swap_ab<K, kMore>(acc, s, state, tokens, blocks, short_end, consumer, lane);
  multiply_tokens<K, kTokens>(acc, s, state, blocks, short_end, consumer, lane);
}

// acc = scale * acc + bias_scale * bias, for a block of 64 weights and kTokens tokens from the first on.
template <int kTokens, int kTileM, int kTileN>
DEVICE void apply_swap_ab(const EpilogueStage<kTileM, kTileN, false>& stage, float (&acc)[kTokens / 2], int first_token,
                          int first_weight, int warp, int lane) {
  const int weight = first_weight + warp * 16 + lane / 4;
  const float bias[2] = {stage.bias[weight], stage.bias[weight + 8]};
#pragma unroll
  for (int vector = 0; vector < kTokens / 8; ++vector) {
    const int token = first_token + vector * 8 + lane % 4 * 2;
    const float2 scale = *reinterpret_cast<const float2*>(&stage.scale[token]);
    const float2 of_bias = *reinterpret_cast<const float2*>(&stage.bias_scale[token]);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      float* x = acc + vector * 4 + lower * 2;
      x[0] = fmaf(x[0], scale.x, bias[lower] * of_bias.x);
      x[1] = fmaf(x[1], scale.y, bias[lower] * of_bias.y);
    }
  }
}

// 64 weights of so many tokens, kTokens at most, which begin at acc[0], to a subtile whose rows are tokens.
template <class Out, int kTokens>
DEVICE void store_to_smem_swap_ab(const float* acc, int tokens, uint8_t* subtile, int warp, int lane) {
  const uint32_t base = ptx::smem_address(subtile);
#pragma unroll
  for (int pair = 0; pair < kTokens / 16; ++pair) {  // 16 tokens: two vectors, upper and lower weights of each
    if (pair * 16 >= tokens) break;                  // known to the compiler
    const float* x = acc + pair * 8;
    ptx::store_matrix_x4_transposed(base + in_subtile(pair * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                                    {ptx::pack<Out>(x[0], x[1]), ptx::pack<Out>(x[2], x[3]), ptx::pack<Out>(x[4], x[5]),
                                     ptx::pack<Out>(x[6], x[7])});
  }
}

template <class K>
DEVICE void consume_swap_ab(typename K::Storage& s, const typename K::Params& p, int consumer) {
  using Layout = typename K::Layout;
  static_assert(Layout::kSubtiles == kWeightBlocks<K> && Layout::kParts == 1,
                "a subtile for each block of weights, handed over together");
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  WorkTileReader tiles(s.work);
  PipelineState<K::kStages> state;
  PipelineState<Layout::kSlots> slot;
  [[maybe_unused]] uint32_t epilogue_phase = 0;
  SwapAbAccumulators<K> acc;
  // ptxas serialises products that go on from stage to stage if other instructions write their accumulators.
  constexpr bool kInParts = K::B::kPacked;
  const auto end_tile = [&] {
    if constexpr (K::kScaleBias) {
      barrier_arrive(&s.epilogue.empty);
      epilogue_phase ^= 1;
    }
  };
  for (WorkTile tile; tiles.next(tile);) {
    if (tile.idle) skip<K>(s, state, p.k_blocks, lane);
    else if constexpr (K::B::kPacked) multiply_packed<K>(acc[0], s, state, p, tile, consumer, warp, lane);
    else multiply_swap_ab<K>(acc, s, state, tile.rows, p.k_blocks, K::Groups::short_end(p), consumer, lane);
    if constexpr (K::kScaleBias) barrier_wait(&s.epilogue.full, epilogue_phase);
    if constexpr (K::kScaleBias && !kInParts) {
#pragma unroll
      for (int i = 0; i < kWeightBlocks<K>; ++i)
        apply_swap_ab<K::kTileM>(s.epilogue.stage, acc[i], 0, weight_block<K>(consumer, i) * 64, warp, lane);
      end_tile();
    }
#pragma unroll
    for (int block = 0; block < (K::kTileM + Layout::kRows - 1) / Layout::kRows; ++block) {
      if (block >= K::row_blocks(tile, consumer)) break;
      barrier_wait(&s.out_empty[consumer][slot.stage], slot.phase ^ 1);
#pragma unroll
      for (int i = 0; i < kWeightBlocks<K>; ++i) {
        float* from = acc[i] + block * (Layout::kRows / 2);
        [[maybe_unused]] float part[Layout::kRows / 2];
        if constexpr (K::kScaleBias && kInParts) {
#pragma unroll
          for (int j = 0; j < Layout::kRows / 2; ++j) part[j] = from[j];
          apply_swap_ab<Layout::kRows>(s.epilogue.stage, part, block * Layout::kRows, weight_block<K>(consumer, i) * 64,
                                       warp, lane);
          from = part;
        }
        const int tokens = min(Layout::kRows, K::kTileM - block * Layout::kRows);
        uint8_t* to = s.smem_out[consumer] + slot.stage * Layout::kPartBytes + i * Layout::kSubtileBytes;
        if constexpr (K::B::kPacked && K::B::kTranspose)
          K::B::template store_to_smem<typename K::Out, Layout::kRows>(from, to, warp, lane);
        else store_to_smem_swap_ab<typename K::Out, Layout::kRows>(from, tokens, to, warp, lane);
      }
      ptx::async_proxy_fence();
      if constexpr (!K::kWholeWarp) __syncwarp();
      if (K::kWholeWarp || lane == 0) barrier_arrive(&s.out_full[consumer][slot.stage]);
      slot.advance();
    }
    if constexpr (kInParts) end_tile();
  }
}

}  // namespace fusible
