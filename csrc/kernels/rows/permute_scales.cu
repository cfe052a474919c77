// SPDX-License-Identifier: Apache-2.0
// A thread has a row, and some blocks of features one after the other: rows that are neighbours store to neighbours.
// Random reads are of four bytes of a table that the second-level cache holds.
#include <cuda_runtime.h>

#include "device/ptx/ptx.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_config.h"
#include "fusible/quantize.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kBlocksOfThread = 8;

__global__ void __launch_bounds__(kThreads)
    permute_scales_kernel(const PermuteScales c, int blocks, int64_t source_pitch, int64_t out_pitch) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= *c.num_rows) return;
  const int64_t token = __ldg(&c.slot_of_row[row]) / c.top_k;
  const int first = blockIdx.y * kBlocksOfThread;
#pragma unroll
  for (int i = 0; i < kBlocksOfThread; ++i)
    if (first + i < blocks) c.out[(first + i) * out_pitch + row] = __ldg(&c.source[(first + i) * source_pitch + token]);
}

}  // namespace

void permute_scales(const PermuteScales& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.features || !c.top_k) return;
  const DeviceGuard guard(device);
  const int64_t rows = c.tokens * c.top_k, blocks = blocks_of(c.features, kScaleBlock);
  const dim3 grid(static_cast<unsigned>(blocks_of(rows, kThreads)),
                  static_cast<unsigned>(blocks_of(blocks, kBlocksOfThread)));
  permute_scales_kernel<<<grid, kThreads, 0, stream>>>(c, static_cast<int>(blocks), row_scales_pitch(c.tokens),
                                                       row_scales_pitch(rows));
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "scales of ", c.tokens, " tokens to ", c.top_k, " slots");
}

}  // namespace fusible
