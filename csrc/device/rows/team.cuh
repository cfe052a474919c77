// SPDX-License-Identifier: Apache-2.0
// The warps that share the experts of a token: one up to 1024 experts, else four, which are a whole block. All lanes
// get the team's results, summed in one order.
#pragma once
#include "device/ptx/ptx.cuh"
#include "device/rows/scores.cuh"

namespace fusible {

template <int kParts>
struct Team {
  int lane, part;
  uint64_t* exchange;  // [kParts] of the block; of no concern for one part

  DEVICE void meet() const {
    if constexpr (kParts == 1) __syncwarp();
    else __syncthreads();
  }
  DEVICE float sum(float x) const {
#pragma unroll
    for (int bit = 16; bit; bit /= 2) x += __shfl_xor_sync(~0u, x, bit);
    return across(x, [](float a, float b) INLINE { return a + b; });
  }
  DEVICE uint32_t highest(uint32_t key) const {
    return across(__reduce_max_sync(~0u, key), [](uint32_t a, uint32_t b) INLINE { return a > b ? a : b; });
  }
  // The lowest of the experts with the highest key.
  DEVICE void best(uint32_t& key, uint32_t& expert) const {
    const uint32_t most = __reduce_max_sync(~0u, key);
    expert = __reduce_min_sync(~0u, key == most ? expert : ~0u);
    const uint64_t packed = across(static_cast<uint64_t>(most) << 32 | ~expert,
                                   [](uint64_t a, uint64_t b) INLINE { return a > b ? a : b; });
    key = static_cast<uint32_t>(packed >> 32), expert = ~static_cast<uint32_t>(packed);
  }

 private:
  template <class T, class Join>
  DEVICE T across(T x, Join join) const {
    if constexpr (kParts == 1) {
      return x;
    } else {
      T* values = reinterpret_cast<T*>(exchange);
      if (lane == 0) values[part] = x;
      __syncthreads();
      x = values[0];
#pragma unroll
      for (int p = 1; p < kParts; ++p) x = join(x, values[p]);
      __syncthreads();
      return x;
    }
  }
};

// The experts of a lane, `kCount` in a row of numbers: four neighbours of every 128.
template <int kCount, int kParts>
DEVICE int expert_of(int i, const Team<kParts>& team) {
  return team.part * 32 * kCount + i / 4 * 128 + 4 * team.lane + i % 4;
}

}  // namespace fusible
