// SPDX-License-Identifier: Apache-2.0
// Blocks of tokens, which begin anew at each group: block 0 is the first of the first group that has tokens.
#pragma once
#include "device/gemm/groups.cuh"
#include "fusible/scale_block.h"

namespace fusible {

struct TokenBlock {
  int64_t number, first_row;
  int rows;             // 0: no such block
  int group, in_group;  // the number of the group, and of the block within the group
};

// Called by every thread of a block of threads; its first warp walks the groups.
template <int kSize = kScaleBlock>
__device__ TokenBlock find_token_block(const SplitSizes& sizes, int tokens, int wanted) {
  __shared__ int first_row;
  __shared__ int rows;
  __shared__ int group;
  __shared__ int in_group;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    if (lane == 0) rows = 0;
    __syncwarp();
    int before = 0, blocks = 0;
    for (int base = 0; base < sizes.groups && blocks <= wanted; base += 32) {
      const auto [start, size, cut] = rows_of_lane(sizes, base + lane, tokens, before, lane);
      const int mine = (size + kSize - 1) / kSize, after = blocks + scan(mine, lane), skipped = wanted - (after - mine);
      if (skipped >= 0 && skipped < mine) {
        first_row = start + skipped * kSize;
        rows = min(size - skipped * kSize, kSize);
        group = base + lane;
        in_group = skipped;
      }
      blocks = __shfl_sync(~0u, after, 31);
    }
  }
  __syncthreads();
  return {wanted, first_row, rows, group, in_group};
}

// Blocks of threads that share tokens are beside one another: `chunks` of them, each with some tiles of features.
template <class Call>
DEVICE TokenBlock token_block(const Call& c, int chunks) {
  return find_token_block(c.sizes, static_cast<int>(c.tokens), blockIdx.x / chunks);
}

struct BlockFeatures {
  int64_t width, first;

  template <class Call>
  DEVICE BlockFeatures(const Call& c, int chunks)
      : width(static_cast<int64_t>(c.tiles) * kScaleBlock), first(blockIdx.x % chunks * width) {}
  template <class Call>
  DEVICE int64_t end(const Call& c) const {
    return min(c.features, first + width);
  }
};

}  // namespace fusible
