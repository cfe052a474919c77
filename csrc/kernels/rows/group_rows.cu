// SPDX-License-Identifier: Apache-2.0
// A block takes a chunk: at most kChunkRows rows of one group. Which ones, one warp finds by walking the group sizes,
// so the grid depends on no size. Sums are taken in two steps, chunks first, so that one long group keeps the whole
// device busy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "device/gemm/groups.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/vector.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/group_rows.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kChunkRows = 256;

// Every group may leave a rest, and so may the rows past the last one.
int64_t most_chunks(int64_t tokens, int groups) { return tokens / kChunkRows + groups + 1; }

struct Chunk {
  int group;  // the number of groups: rows of no group; more: no such chunk
  int64_t first_row, rows;
};

// Walks the groups, 32 at a time, and calls visit(group, its first row, its rows, chunks before it) in every lane,
// until it is true in some lane, whose number it returns; -1 if there is none. The last group has the rows past all
// others. Called by one warp. Without sizes, one group has all rows.
template <class Visit>
__device__ int walk(const SplitSizes& sizes, int64_t tokens, int lane, Visit visit) {
  int64_t before = 0, chunks = 0;
  for (int base = 0; base <= sizes.groups; base += 32) {
    const int group = base + lane;
    const auto [start, size, cut] = sizes.sizes ? rows_of_lane(sizes, group, tokens, before, lane)
                                                : GroupRows<int64_t>{group ? tokens : 0, group ? 0 : tokens, false};
    const int64_t rows = group == sizes.groups ? tokens - start : size, of_group = (rows + kChunkRows - 1) / kChunkRows,
                  after = chunks + scan(of_group, lane);
    const unsigned lanes = __ballot_sync(~0u, visit(group, start, rows, after - of_group, of_group));
    if (lanes) return __ffs(lanes) - 1;
    chunks = __shfl_sync(~0u, after, 31);
  }
  return -1;
}

// The chunk of this block; every thread gets it.
__device__ Chunk chunk_of_block(const SplitSizes& sizes, int64_t tokens) {
  __shared__ Chunk chunk;
  const int lane = threadIdx.x % 32;
  const int64_t wanted = blockIdx.x;
  if (threadIdx.x < 32) {
    Chunk mine{};
    const int owner =
        walk(sizes, tokens, lane, [&](int group, int64_t first, int64_t rows, int64_t before, int64_t of_group) {
          const int64_t skipped = (wanted - before) * kChunkRows;
          mine = {group, first + skipped, min(rows - skipped, int64_t{kChunkRows})};
          return wanted >= before && wanted < before + of_group;
        });
    if (owner < 0 && lane == 0) chunk = {sizes.groups + 1, 0, 0};
    if (lane == owner) chunk = mine;
  }
  __syncthreads();
  return chunk;
}

// partial[chunk, n]: 32 lanes side by side, the warps take rows by turns, and add up in their order.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads)
    sum_chunks(const DenseRows rows, const float* scale, const SplitSizes sizes, float* partial) {
  __shared__ float sums[kWarps][32 * kVector];
  const Chunk chunk = chunk_of_block(sizes, rows.tokens);
  if (chunk.group >= sizes.groups) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first_column = blockIdx.y * int64_t{32 * kVector}, column = first_column + lane * kVector;
  float sum[kVector] = {};
  if (column < rows.columns) {
    const T* data = static_cast<const T*>(rows.data) + column;
#pragma unroll 4
    for (int64_t r = warp; r < chunk.rows; r += kWarps) {
      const int64_t row = chunk.first_row + r;
      const auto x = *reinterpret_cast<const Vector<T, kVector>*>(data + row * rows.pitch);
      const float factor = scale ? scale[row] : 1.f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] = fmaf(factor, static_cast<float>(x.values[i]), sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums[warp][i * 32 + lane] = sum[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * kVector; i += kThreads) {
    float total = 0.f;
    for (int w = 0; w < kWarps; ++w) total += sums[w][i];
    const int64_t at = first_column + i % 32 * kVector + i / 32;
    if (at < rows.columns) partial[blockIdx.x * rows.columns + at] = total;
  }
}

// out[g, n]: the chunks of a group in their order.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    add_chunks(const float* partial, int64_t columns, const SplitSizes sizes, int64_t tokens, Out* out) {
  __shared__ int64_t first, count;
  const int wanted = blockIdx.x, lane = threadIdx.x % 32;
  if (threadIdx.x < 32)
    walk(sizes, tokens, lane, [&](int group, int64_t, int64_t, int64_t before, int64_t of_group) {
      if (group == wanted) first = before, count = of_group;
      return group == wanted;
    });
  __syncthreads();
  const int64_t column = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  if (column >= columns) return;
  float total = 0.f;
#pragma unroll 8
  for (int64_t c = 0; c < count; ++c) total += partial[(first + c) * columns + column];
  out[wanted * columns + column] = static_cast<Out>(total);
}

// A warp a row.
template <class T, class V, int kVector>
__global__ void __launch_bounds__(kThreads)
    dot_rows(const DenseRows rows, const V* vectors, const SplitSizes sizes, float* out) {
  const Chunk chunk = chunk_of_block(sizes, rows.tokens);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const V* vector = vectors + chunk.group * rows.columns;
  for (int64_t r = warp; r < chunk.rows; r += kWarps) {
    const T* row = static_cast<const T*>(rows.data) + (chunk.first_row + r) * rows.pitch;
    float sum = 0.f;
    if (chunk.group < sizes.groups)
      for (int64_t column = lane * kVector; column < rows.columns; column += 32 * kVector) {
        const auto x = *reinterpret_cast<const Vector<T, kVector>*>(row + column);
        const auto v = *reinterpret_cast<const Vector<V, kVector>*>(vector + column);
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          sum = fmaf(static_cast<float>(x.values[i]), static_cast<float>(v.values[i]), sum);
      }
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) out[chunk.first_row + r] = sum;
  }
}

// Whether rows can be read in vectors of 16 bytes.
bool fits(const DenseRows& r, const void* more = nullptr) {
  return vectors_fit(16 / bytes_of(r.type), {r.columns, r.pitch}, {r.data, more});
}

template <class T, int kVector>
void launch_sums(const ColumnSums& c, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(most_chunks(c.rows.tokens, c.sizes.groups)),
                  static_cast<unsigned>(blocks_of(c.rows.columns, 32 * kVector)));
  sum_chunks<T, kVector><<<grid, kThreads, 0, stream>>>(c.rows, c.scale, c.sizes, c.workspace);
}

template <class Out>
void launch_additions(const ColumnSums& c, cudaStream_t stream) {
  const dim3 grid(c.sizes.groups, static_cast<unsigned>(blocks_of(c.rows.columns, kThreads)));
  add_chunks<<<grid, kThreads, 0, stream>>>(c.workspace, c.rows.columns, c.sizes, c.rows.tokens,
                                            static_cast<Out*>(c.out));
}

template <class T, class V, int kVector>
void launch_dots(const RowDots& c, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(most_chunks(c.rows.tokens, c.sizes.groups));
  dot_rows<T, V, kVector><<<grid, kThreads, 0, stream>>>(c.rows, static_cast<const V*>(c.vectors), c.sizes, c.out);
}

template <class T, int kVector>
void launch_dots(const RowDots& c, cudaStream_t stream) {
  const bool vectors = fits(c.rows, c.vectors);
  if (c.vectors_type == DType::kFloat32)
    vectors ? launch_dots<T, float, kVector>(c, stream) : launch_dots<T, float, 1>(c, stream);
  else vectors ? launch_dots<T, T, kVector>(c, stream) : launch_dots<T, T, 1>(c, stream);
}

}  // namespace

// Enough for most_chunks(tokens, groups), and on a line in the tokens: replays of other lengths count on that.
int64_t column_sums_workspace(int64_t tokens, int64_t columns, int groups) {
  return (tokens + (groups + 1) * kChunkRows) * blocks_of(columns * static_cast<int64_t>(sizeof(float)), kChunkRows);
}

void column_sums(const ColumnSums& c, int device, cudaStream_t stream) {
  if (!c.sizes.groups || !c.rows.columns) return;
  const DeviceGuard guard(device);
  dispatch_dtype(c.rows.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    fits(c.rows) ? launch_sums<T, 16 / sizeof(T)>(c, stream) : launch_sums<T, 1>(c, stream);
  });
  dispatch_dtype(c.out_type, [&](auto type) { launch_additions<Element<decltype(type)::value>>(c, stream); });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "column sums of ", c.rows.tokens, " rows of ", c.rows.columns, " columns, ",
                     c.sizes.groups, " groups");
}

void row_dots(const RowDots& c, int device, cudaStream_t stream) {
  if (!c.rows.tokens) return;
  const DeviceGuard guard(device);
  dispatch_dtype(c.rows.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    launch_dots<T, 16 / sizeof(T)>(c, stream);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "row dots of ", c.rows.tokens, " rows of ", c.rows.columns, " columns, ",
                     c.sizes.groups, " groups");
}

}  // namespace fusible
