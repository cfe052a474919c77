// SPDX-License-Identifier: Apache-2.0
// The partial sums of an activation backward's epilogue, added in a fixed order: shares of the scales' gradient, which
// are the subtiles of columns of a row; and sums by column over blocks of 64 rows, which are those of the
// pre-activation's bias and of numbers of columns.
#include <cuda_runtime.h>

#include <algorithm>
#include <span>

#include "device/epilogue/epilogue_vectors.cuh"
#include "device/gemm/groups.cuh"
#include "device/rows/rows.cuh"
#include "fusible/error.h"
#include "kernels/activation/activation_entry.h"

namespace fusible {
namespace {

constexpr int kThreads = 256;
// Lanes that add up a row of partial sums, four columns each. Sums over all rows have few blocks of threads.
constexpr int kLanesOfGroup = 32, kLanesOfAllRows = 8, kSlices = kLanesOfGroup / kLanesOfAllRows;

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

// The first row of each group, and behind the last one; by one warp.
DEVICE void find_starts(const ColumnSumsOfBlocks& call, int (&starts)[kMaxGroups + 1]) {
  const int lane = threadIdx.x;
  int before = 0;
  for (int base = 0; base < call.sizes.groups; base += 32) {
    const auto rows = rows_of_lane(call.sizes, base + lane, call.tokens, before, lane);
    if (base + lane < call.sizes.groups) starts[base + lane] = rows.start;
  }
  if (lane == 0) starts[call.sizes.groups] = before;
}

// Blocks of 64 rows, by their numbers in the partial sums.
struct Blocks {
  int64_t first;
  int count;
};
DEVICE Blocks blocks_of_group(int group, int start, int end) {
  return {block_of_rows(group, start, 0), (end - start + 63) / 64};
}

// Adds four columns of every kStep-th block. Loads that are written apart from the additions are on their way together.
template <int kStep>
DEVICE void add_blocks(float4& sum, const float* from, int64_t columns, const Blocks& blocks, int first) {
  constexpr int kLoads = 4;
  from += blocks.first * columns;
#pragma unroll 1
  for (int i = first; i < blocks.count; i += kLoads * kStep) {
    float4 x[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int block = i + j * kStep;
      x[j] = block < blocks.count ? *reinterpret_cast<const float4*>(from + block * columns) : float4{};
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum.x += x[j].x, sum.y += x[j].y, sum.z += x[j].z, sum.w += x[j].w;
  }
}

// Writes row number `row` of an output, of as many columns as kLanes lanes side by side add up. The threads above one
// another are walkers: each calls add(sum, its columns, its number), and they are added up in their order.
template <int kLanes, class Add>
DEVICE void sum_columns(const ColumnPartials& to, float4 (&sums)[kThreads], int row, int slice, Add add) {
  constexpr int kColumns = 4 * kLanes, kWalkers = kThreads / kLanes;
  const int column = slice * kColumns + threadIdx.x % kLanes * 4;
  float4 sum{};
  if (column < to.columns) add(sum, to.partials + column, static_cast<int>(threadIdx.x / kLanes));
  sums[threadIdx.x] = sum;
  __syncthreads();
  const int mine = slice * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns || mine >= to.columns) return;
  float total = 0.f;
  for (int i = 0; i < kWalkers; ++i) total += reinterpret_cast<const float*>(&sums[i * kLanes])[threadIdx.x];
  const int64_t first = static_cast<int64_t>(row) * to.columns;
  write_number(to.out, to.type, to.block ? 2 * first + gate_column(mine, to.block) : first + mine, total);
}

// Each blockIdx.z sums one output: the sums of one group or, for all rows, of few columns.
__global__ void __launch_bounds__(kThreads, 6) sum_column_partials_kernel(const ColumnSumsOfBlocks call) {
  __shared__ float4 sums[kThreads];
  __shared__ int starts[kMaxGroups + 1];
  ptx::let_next_kernel_begin();
  const ColumnPartials& to = call.outputs[blockIdx.z];
  const int x = blockIdx.x, groups = call.sizes.groups;
  if (to.of_all_rows) {
    const int slice = blockIdx.y * kSlices + x;
    if (x >= kSlices || slice * 4 * kLanesOfAllRows >= to.columns) return;
    if (threadIdx.x < 32) find_starts(call, starts);
    __syncthreads();
    sum_columns<kLanesOfAllRows>(to, sums, 0, slice, [&](float4& sum, const float* from, int walker) INLINE {
      for (int group = walker; group < groups; group += kThreads / kLanesOfAllRows)
        add_blocks<1>(sum, from, to.columns, blocks_of_group(group, starts[group], starts[group + 1]), 0);
    });
  } else if (x < groups && blockIdx.y * 4 * kLanesOfGroup < to.columns) {
    const int start = static_cast<int>(rows_before(call.sizes, x, call.tokens)),
              end = start + clamped_size(call.sizes, x, call.tokens - start);
    sum_columns<kLanesOfGroup>(to, sums, x, blockIdx.y, [&](float4& sum, const float* from, int walker) INLINE {
      add_blocks<kThreads / kLanesOfGroup>(sum, from, to.columns, blocks_of_group(x, start, end), walker);
    });
  }
}

}  // namespace

void add_dvectors(ColumnSumsOfBlocks& sums, std::span<const DVector> dvectors, const float* partials, int columns,
                  int block) {
  const int64_t blocks = sums.tokens / 64 + sums.sizes.groups;
  for (const DVector& to : dvectors) {
    if (to.data)
      sums.outputs[sums.count++] = {.partials = partials,
                                    .columns = columns,
                                    .of_all_rows = to.of_all_rows,
                                    .out = to.data,
                                    .type = to.type,
                                    .block = to.of_both ? block : 0};
    if (partials) partials += blocks * columns;
  }
}

void sum_dscale_partials(const float* dscale_partials, int count, int64_t tokens, const SplitSizes& sizes, void* out,
                         DType type, cudaStream_t stream) {
  const int64_t blocks = (tokens + kThreads - 1) / kThreads;
  sum_dscale_partials_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(dscale_partials, count, tokens,
                                                                                     sizes, out, type);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "sum of ", count, " dscale_partials for ", tokens, " tokens");
}

void sum_column_partials(const ColumnSumsOfBlocks& call, cudaStream_t stream) {
  if (!call.count) return;
  int columns = 0;
  bool of_all_rows = false;
  for (const ColumnPartials& to : std::span(call.outputs, call.count))
    columns = std::max(columns, to.columns), of_all_rows |= to.of_all_rows;
  const dim3 grid(of_all_rows ? std::max(call.sizes.groups, kSlices) : call.sizes.groups,
                  static_cast<unsigned>(blocks_of(columns, 4 * kLanesOfGroup)), call.count);
  sum_column_partials_kernel<<<grid, kThreads, 0, stream>>>(call);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), call.count, " sums of blocks of ", call.tokens, " rows, at most ", columns,
                     " columns, ", call.sizes.groups, " groups");
}

}  // namespace fusible
