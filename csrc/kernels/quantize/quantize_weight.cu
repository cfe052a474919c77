// SPDX-License-Identifier: Apache-2.0
// A block takes a tile of 128 x 128 values of one matrix, which it reads once and writes in place and transposed. Where
// scales are of more than a tile, a kernel finds the largest magnitudes, and another casts.
#include <cuda_runtime.h>

#include "device/gemm/matrix_table.cuh"
#include "device/ptx/element.cuh"
#include "device/quantize/quantize_whole.cuh"
#include "fusible/device.h"
#include "fusible/error.h"

namespace fusible {
namespace {

struct WeightBlocks {
  int64_t half_rows, of_half, of_rows, of_columns;  // rows of a half, and blocks of 128
};

template <class T>
constexpr int blocks_per_multiprocessor() {
  return sizeof(T) == 2 ? 4 : 2;
}

// The tile of a block of threads.
template <class T>
struct WeightTile {
  int64_t group, row_block, column_block, first_row, first_column;
  TileExtent extent;
  Tile<T> tile;

  template <int kCapacity>
  DEVICE WeightTile(const QuantizeWeight& c, const MatrixTable<kCapacity>& table, const WeightBlocks& blocks,
                    const TilePosition& at) {
    column_block = blockIdx.x % blocks.of_columns;
    const int64_t rest = blockIdx.x / blocks.of_columns;
    row_block = rest % blocks.of_rows, group = rest / blocks.of_rows;
    const int64_t in_half = row_block % blocks.of_half * kScaleBlock;
    first_row = row_block / blocks.of_half * blocks.half_rows + in_half, first_column = column_block * kScaleBlock;
    extent = {of_one_tile(blocks.half_rows - in_half), of_one_tile(c.k - first_column)};
    const T* weight =
        table.template matrix<T>(c, group) + (first_row + at.row()) * c.pitch + first_column + at.feature();
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) tile.load(i, extent.has(at, i), weight + i * c.pitch);
  }
  // The bytes of the tile's columns, each multiplied by encode[f], to the transposed copy.
  DEVICE void store_transposed(const QuantizeWeight& c, const float (&encode)[8], TransposedTile& shared,
                               const TilePosition& at) const {
    stage_columns(tile, encode, shared, at);
    __syncthreads();
    uint8_t* to = c.transposed + (group * c.k + first_column) * c.n + first_row;
    each_staged(shared, [&](int column, int row, const uint4& bytes) INLINE {
      ptx::store_vector_if(column < extent.features && row < extent.rows, to + column * c.n + row, bytes);
    });
  }
};

template <class T, int kCapacity>
__global__ void __launch_bounds__(kQuantizeThreads, blocks_per_multiprocessor<T>())
    quantize_weight_kernel(const __grid_constant__ QuantizeWeight c,
                           const __grid_constant__ MatrixTable<kCapacity> table, const WeightBlocks blocks) {
  __shared__ TransposedTile shared;
  const TilePosition at;
  const WeightTile<T> t(c, table, blocks, at);
  const Encoding encoding = encoding_of<T>(largest_of_block<T>(largest_word(t.tile)), c.power_of_two);
  if (threadIdx.x == 0) {
    const int64_t in_group = c.scales_transposed ? t.column_block * blocks.of_rows + t.row_block
                                                 : t.row_block * blocks.of_columns + t.column_block;
    c.scales[t.group * blocks.of_rows * blocks.of_columns + in_group] = encoding.decode;
  }
  if (c.data) {
    uint8_t* to = c.data + (t.group * c.n + t.first_row + at.row()) * c.k + t.first_column + at.feature();
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const uint2 bytes = row_bytes(t.tile, i, encoding.encode);
      ptx::store_vector_if(t.extent.has(at, i), to + i * c.k, bytes);
    }
  }
  if (!c.transposed) return;
  float encode[8];
#pragma unroll
  for (float& e : encode) e = encoding.encode;
  t.store_transposed(c, encode, shared, at);
}

// The largest magnitudes of groups, or of those rows and columns that are wanted.
template <class T, int kCapacity>
__global__ void __launch_bounds__(kQuantizeThreads, blocks_per_multiprocessor<T>())
    amax_of_weight_kernel(const __grid_constant__ QuantizeWeight c,
                          const __grid_constant__ MatrixTable<kCapacity> table, const WeightBlocks blocks,
                          const Maxima maxima) {
  __shared__ ColumnMaxima<T> shared;
  const TilePosition at;
  const WeightTile<T> t(c, table, blocks, at);
  if (maxima.groups) {
    const float amax = largest_of_block<T>(largest_word(t.tile));
    if (threadIdx.x == 0) raise(maxima.groups + t.group, amax);
    return;
  }
  if (c.data) {
    uint32_t most[kTileRows];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) most[i] = largest_word(t.tile, i);
    const float amax = largest_of_row<T>(most, at);
    const int owned = at.row() + at.c / 2;
    if (at.c % 2 == 0 && owned < t.extent.rows) raise(maxima.rows + t.group * c.n + t.first_row + owned, amax);
  }
  if (!c.transposed) return;
  shared.put(t.tile, at);
  __syncthreads();
  if (const int f = threadIdx.x; f < t.extent.features)
    raise(maxima.columns + t.group * c.k + t.first_column + f, shared.largest(f));
}

template <class T, int kCapacity>
__global__ void __launch_bounds__(kQuantizeThreads, blocks_per_multiprocessor<T>())
    cast_weight_kernel(const __grid_constant__ QuantizeWeight c, const __grid_constant__ MatrixTable<kCapacity> table,
                       const WeightBlocks blocks, const Maxima maxima) {
  __shared__ TransposedTile shared;
  __shared__ float encode_of_row[kScaleBlock];
  __shared__ float encode_of_column[kScaleBlock];
  const TilePosition at;
  const WeightTile<T> t(c, table, blocks, at);
  const WholeScales scales{c.power_of_two, c.encode};
  const int i = threadIdx.x % kScaleBlock;  // the first threads look after the rows, the others after the columns
  if (threadIdx.x < kScaleBlock) {
    if (c.data && i < t.extent.rows) {
      const int64_t row = t.group * c.n + t.first_row + i;
      const Encoding encoding = scales.of<T>(maxima.groups ? maxima.groups[t.group] : maxima.rows[row], t.group);
      encode_of_row[i] = encoding.encode;
      if (t.column_block == 0) c.scales[row] = encoding.decode;
    }
  } else if (c.transposed && i < t.extent.features) {
    const int64_t column = t.group * c.k + t.first_column + i;
    const Encoding encoding = scales.of<T>(maxima.groups ? maxima.groups[t.group] : maxima.columns[column], t.group);
    encode_of_column[i] = encoding.encode;
    if (t.row_block == 0) c.transposed_scales[column] = encoding.decode;
  }
  __syncthreads();
  if (c.data)
    store_scaled_rows(t.tile, at, t.extent, encode_of_row,
                      c.data + (t.group * c.n + t.first_row) * c.k + t.first_column, c.k);
  if (!c.transposed) return;
  float encode[8];
  load(encode, encode_of_column + at.feature());
  t.store_transposed(c, encode, shared, at);
}

template <class T, int kCapacity>
void launch(const QuantizeWeight& c, cudaStream_t stream) {
  const MatrixTable<kCapacity> table(c.addresses);
  const int64_t half = c.n / c.halves, of_half = blocks_of(half, kScaleBlock);
  const WeightBlocks blocks{half, of_half, of_half * c.halves, blocks_of(c.k, kScaleBlock)};
  const unsigned grid = static_cast<unsigned>(c.groups * blocks.of_rows * blocks.of_columns);
  if (c.scaling == Scaling::kBlocks) {
    quantize_weight_kernel<T, kCapacity><<<grid, kQuantizeThreads, 0, stream>>>(c, table, blocks);
    return;
  }
  const Maxima maxima(c.scaling, c.amax, c.groups * c.n);
  const int64_t count = largest_magnitudes(c.scaling, c.groups * c.n, c.groups, c.k);
  FUSIBLE_CUDA_CHECK(cudaMemsetAsync(c.amax, 0, count * sizeof(float), stream), "zeroing ", count, " magnitudes");
  amax_of_weight_kernel<T, kCapacity><<<grid, kQuantizeThreads, 0, stream>>>(c, table, blocks, maxima);
  cast_weight_kernel<T, kCapacity><<<grid, kQuantizeThreads, 0, stream>>>(c, table, blocks, maxima);
}

}  // namespace

void quantize_weight(const QuantizeWeight& c, int device, cudaStream_t stream) {
  if (!c.groups || !c.n || !c.k) return;
  FUSIBLE_CHECK(c.addresses.size() <= kMaxGroups, "at most ", kMaxGroups, " matrices, got ", c.addresses.size());
  const DeviceGuard guard(device);
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    c.addresses.size() <= 64 ? launch<T, 64>(c, stream) : launch<T, kMaxGroups>(c, stream);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "quantising ", c.groups, " matrices of ", c.n, " x ", c.k);
}

}  // namespace fusible
