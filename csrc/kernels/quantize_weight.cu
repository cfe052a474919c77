// SPDX-License-Identifier: Apache-2.0
// A block takes a tile of 128 x 128 values of one matrix, which it reads once and writes as it lies and transposed.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/element.cuh"
#include "device/quantize.cuh"
#include "fusible/device.h"
#include "fusible/error.h"

namespace fusible {
namespace {

// Matrices that are tensors of their own go along as arguments of the kernel: nothing of the host's is read later.
template <int kCapacity>
struct MatrixTable {
  uintptr_t addresses[kCapacity];
  bool used;
};

struct WeightBlocks {
  int64_t half_rows, of_half, of_rows, of_columns;  // rows of a half, and blocks of 128
};

template <class T>
constexpr int blocks_per_multiprocessor() {
  return sizeof(T) == 2 ? 4 : 2;
}

// The largest of all threads; each gets it.
template <class T>
DEVICE float largest_of_block(uint32_t word) {
  __shared__ uint32_t most[kQuantizeWarps];
#pragma unroll
  for (int offset = 16; offset; offset /= 2) word = Tile<T>::larger(word, __shfl_xor_sync(~0u, word, offset));
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = word;
  __syncthreads();
  word = most[0];
#pragma unroll
  for (int w = 1; w < kQuantizeWarps; ++w) word = Tile<T>::larger(word, most[w]);
  return Tile<T>::largest(word);
}

template <class T, int kCapacity>
__global__ void __launch_bounds__(kQuantizeThreads, blocks_per_multiprocessor<T>())
    quantize_weight_kernel(const __grid_constant__ QuantizeWeight c,
                           const __grid_constant__ MatrixTable<kCapacity> table, const WeightBlocks blocks) {
  __shared__ TransposedTile shared;
  const int64_t column_block = blockIdx.x % blocks.of_columns, rest = blockIdx.x / blocks.of_columns,
                row_block = rest % blocks.of_rows, group = rest / blocks.of_rows;
  const int64_t in_half = row_block % blocks.of_half * kScaleBlock,
                first_row = row_block / blocks.of_half * blocks.half_rows + in_half,
                first_column = column_block * kScaleBlock;
  const TileExtent extent{static_cast<int>(min(blocks.half_rows - in_half, int64_t{kScaleBlock})),
                          static_cast<int>(min(c.k - first_column, int64_t{kScaleBlock}))};
  const TilePosition at;
  const T* weight = table.used ? reinterpret_cast<const T*>(table.addresses[group])
                               : static_cast<const T*>(c.weight) + group * c.group_stride;
  weight += (first_row + at.row()) * c.pitch + first_column + at.feature();
  Tile<T> tile;
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) tile.load(i, extent.has(at, i), weight + i * c.pitch);

  const Encoding encoding = encoding_of<T>(largest_of_block<T>(tile.largest_word()), c.power_of_two);
  if (threadIdx.x == 0) {
    const int64_t in_group =
        c.scales_transposed ? column_block * blocks.of_rows + row_block : row_block * blocks.of_columns + column_block;
    c.scales[group * blocks.of_rows * blocks.of_columns + in_group] = encoding.decode;
  }
  if (c.data) {
    uint8_t* to = c.data + (group * c.n + first_row + at.row()) * c.k + first_column + at.feature();
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const uint2 bytes = row_bytes(tile, i, encoding.encode);
      ptx::store_vector_if(extent.has(at, i), to + i * c.k, bytes);
    }
  }
  if (!c.transposed) return;
  float encode[8];
#pragma unroll
  for (float& e : encode) e = encoding.encode;
  stage_columns(tile, encode, shared, at);
  __syncthreads();
  uint8_t* to = c.transposed + (group * c.k + first_column) * c.n + first_row;
  each_staged(shared, [&](int column, int row, const uint4& bytes) INLINE {
    ptx::store_vector_if(column < extent.features && row < extent.rows, to + column * c.n + row, bytes);
  });
}

template <class T, int kCapacity>
void launch(const QuantizeWeight& c, cudaStream_t stream) {
  MatrixTable<kCapacity> table;  // what is not filled is not read
  table.used = !c.addresses.empty();
  std::ranges::copy(c.addresses, table.addresses);
  const int64_t half = c.n / c.halves, of_half = blocks_of(half, kScaleBlock);
  const WeightBlocks blocks{half, of_half, of_half * c.halves, blocks_of(c.k, kScaleBlock)};
  const unsigned grid = static_cast<unsigned>(c.groups * blocks.of_rows * blocks.of_columns);
  quantize_weight_kernel<T, kCapacity><<<grid, kQuantizeThreads, 0, stream>>>(c, table, blocks);
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
