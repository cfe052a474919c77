// SPDX-License-Identifier: Apache-2.0
// Results of weight gradients that consumers store themselves: shared memory, which limits short contractions, sees
// none of them.
#pragma once
#include "device/element.cuh"
#include "device/work_queue.cuh"

namespace fusible {

// 64 rows of a tile in device memory: the first value, and how many rows and columns exist from there on.
struct ResultRows {
  char* first;
  int rows, columns;
};

template <class Out>
DEVICE ResultRows result_rows(const ResultMatrix& result, const WorkTile& tile, int tile_n, int row, int rows) {
  const int64_t group = result.group_bytes ? tile.coordinate.near * result.group_bytes
                                           : (static_cast<int64_t>(tile.coordinate.near) << 4) +
                                                 (static_cast<int64_t>(tile.coordinate.far) << 34);
  const int column = tile.column * tile_n;
  return {static_cast<char*>(result.data) + group + row * result.row_bytes + column * static_cast<int>(sizeof(Out)),
          rows - row, result.columns - column};
}

// Four words of each lane become the four words of one vector: a quarter's lanes have a word of each of four vectors,
// and then all of one.
DEVICE uint4 transpose_quarter(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const uint32_t first = __shfl_xor_sync(~0u, odd ? x0 : x1, 1), second = __shfl_xor_sync(~0u, odd ? x2 : x3, 1);
  if (odd) x0 = first, x2 = second;
  else x1 = first, x3 = second;
  const uint32_t low = __shfl_xor_sync(~0u, upper ? x0 : x2, 2), high = __shfl_xor_sync(~0u, upper ? x1 : x3, 2);
  return upper ? uint4{low, high, x2, x3} : uint4{x0, x1, low, high};
}

// The accumulators of 64 rows; see wgmma.cuh for which thread holds what.
template <class Out, int kSize>
DEVICE void store_direct(const float (&acc)[kSize], const ResultRows& to, int64_t row_bytes, int warp, int lane) {
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int row = warp * 16 + lane / 4 + lower * 8;
    char* at = to.first + row * row_bytes + lane % 4 * 16;
#pragma unroll
    for (int four = 0; four < kSize / 16; ++four) {
      const float* x = acc + four * 16 + lower * 2;
      const uint4 vector = transpose_quarter(ptx::pack<Out>(x[0], x[1]), ptx::pack<Out>(x[4], x[5]),
                                             ptx::pack<Out>(x[8], x[9]), ptx::pack<Out>(x[12], x[13]), lane);
      if (row < to.rows && (four * 4 + lane % 4) * 8 < to.columns) *reinterpret_cast<uint4*>(at + four * 64) = vector;
    }
  }
}

}  // namespace fusible
