// SPDX-License-Identifier: Apache-2.0
// What the epilogue of an activation's backward leaves in parts, summed in a fixed order: shares of the scales'
// gradient, which are the subtiles of columns of a row; and sums by column over blocks of 64 rows, which are those of
// the pre-activation's bias and of numbers of columns.
#include <cuda_runtime.h>

#include "device/epilogue_vectors.cuh"
#include "device/groups.cuh"
#include "device/rows.cuh"
#include "fusible/error.h"
#include "kernels/activation_entry.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kColumns = 128;  // of a block; a lane adds up four columns

__global__ void __launch_bounds__(kThreads)
    sum_dscale_partials_kernel(const float* dscale_partials, int count, int64_t tokens, const SplitSizes sizes,
                               void* out, DType type) {
  ptx::let_next_kernel_begin();
  const int64_t rows = rows_before(sizes, sizes.groups, tokens);
  const int64_t token = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (token >= tokens) return;
  float sum = 0.f;
  for (int i = 0; token < rows && i < count; ++i) sum += dscale_partials[i * tokens + token];
  write_number(out, type, token, sum);
}

// The warps take a group's blocks by turns, and are added up in their order. kOfBoth: the sums are of gate, or of up,
// in rows where blocks of both alternate.
template <bool kOfBoth>
__global__ void __launch_bounds__(kThreads) sum_dbias_partials_kernel(const DbiasPartials call) {
  __shared__ float4 sums[kWarps][32];
  ptx::let_next_kernel_begin();
  const int group = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            column = blockIdx.y * kColumns + lane * 4;
  const auto start_of = [&](int group) { return static_cast<int>(rows_before(call.sizes, group, call.tokens)); };
  const int start = start_of(group), blocks = (start_of(group + 1) - start + 63) / 64;
  const int64_t first = block_of_rows(group, start, 0);
  float4 sum{};
  if (column < call.columns) {
    const float* from = call.dbias_partials + first * call.columns + column;
#pragma unroll 8
    for (int i = warp; i < blocks; i += kWarps) {
      const float4 x = *reinterpret_cast<const float4*>(from + static_cast<int64_t>(i) * call.columns);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  const int mine = blockIdx.y * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns || mine >= call.columns) return;
  float total = 0.f;
  for (int i = 0; i < kWarps; ++i) total += reinterpret_cast<const float*>(sums[i])[threadIdx.x];
  const int64_t first_of_group = static_cast<int64_t>(group) * call.columns;
  write_number(call.out, call.type,
               kOfBoth ? 2 * first_of_group + gate_column(mine, call.block) : first_of_group + mine, total);
}

}  // namespace

void sum_dscale_partials(const float* dscale_partials, int count, int64_t tokens, const SplitSizes& sizes, void* out,
                         DType type, cudaStream_t stream) {
  const int64_t blocks = (tokens + kThreads - 1) / kThreads;
  sum_dscale_partials_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(dscale_partials, count, tokens,
                                                                                     sizes, out, type);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "sum of ", count, " dscale_partials for ", tokens, " tokens");
}

void sum_dbias_partials(const DbiasPartials& call, cudaStream_t stream) {
  const dim3 grid(call.sizes.groups, static_cast<unsigned>(blocks_of(call.columns, kColumns)));
  const auto kernel = call.block ? sum_dbias_partials_kernel<true> : sum_dbias_partials_kernel<false>;
  kernel<<<grid, kThreads, 0, stream>>>(call);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "sums of blocks of ", call.tokens, " rows of ", call.columns, " columns, ",
                     call.sizes.groups, " groups");
}

}  // namespace fusible
