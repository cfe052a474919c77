// SPDX-License-Identifier: Apache-2.0
// Weight gradients of few long groups: several blocks share the depth of a tile. All slices of a tile but the last
// leave their sums in device memory, in register layout. The last adds them to its own in the order of the slices, so
// that the bits of the result do not depend on which is done first, and stores the tile.
//
// Tasks are handed out in their order, and the last slices of a group have the highest numbers of its tasks. So a slice
// only waits for running ones.
#pragma once
#include "device/gemm/arrivals.cuh"
#include "device/gemm/mainloop.cuh"

namespace fusible {

// Vectors of a consumer's accumulators: [slot, consumer, row block, vector, thread].
template <class K>
DEVICE float4* sums_of(const SplitK& split, int slot, int consumer, int block) {
  constexpr int kVectors = K::kTileN / 8;
  const int first = ((slot * kConsumers + consumer) * K::kRowBlocks + block) * kVectors * 128;
  return reinterpret_cast<float4*>(split.sums) + first + threadIdx.x % 128;
}

// Stores the sums of the first `blocks` row blocks. Called by a consumer.
template <class K>
DEVICE void leave_sums(const float (&acc)[K::kRowBlocks][K::kTileN / 2], const SplitK& split, Slice slice, int consumer,
                       int blocks, int lane) {
#pragma unroll
  for (int i = 0; i < K::kRowBlocks; ++i) {
    if (i >= blocks) break;
    float4* to = sums_of<K>(split, slice.sums() + slice.index() * slice.stride(), consumer, i);
#pragma unroll
    for (int v = 0; v < K::kTileN / 8; ++v)
      to[v * 128] = {acc[i][v * 4], acc[i][v * 4 + 1], acc[i][v * 4 + 2], acc[i][v * 4 + 3]};
  }
  __syncwarp();
  if (lane == 0) tell_arrived({split.arrived, 1}, slice.sums() * kConsumers + consumer);
}

template <class K>
DEVICE void add_sums(float (&acc)[K::kRowBlocks][K::kTileN / 2], const SplitK& split, Slice slice, int consumer,
                     int blocks, int lane) {
  if (lane == 0) wait_for_block({split.arrived, 4 * (slice.count() - 1)}, slice.sums() * kConsumers + consumer);
  __syncwarp();
#pragma unroll 1
  for (int index = 0; index + 1 < slice.count(); ++index) {
#pragma unroll
    for (int i = 0; i < K::kRowBlocks; ++i) {
      if (i >= blocks) break;
      const float4* from = sums_of<K>(split, slice.sums() + index * slice.stride(), consumer, i);
#pragma unroll
      for (int v = 0; v < K::kTileN / 8; ++v) {
        const float4 x = from[v * 128];
        acc[i][v * 4] += x.x, acc[i][v * 4 + 1] += x.y, acc[i][v * 4 + 2] += x.z, acc[i][v * 4 + 3] += x.w;
      }
    }
  }
}

}  // namespace fusible
