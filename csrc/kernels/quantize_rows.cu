// SPDX-License-Identifier: Apache-2.0
// A block takes 128 tokens of one group, and some tiles of 128 features one after the other. The loads of a tile are on
// their way while the columns of the one before are stored.
#include <cuda_runtime.h>

#include "device/element.cuh"
#include "device/quantize.cuh"
#include "device/token_blocks.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "kernels/quantize_launch.h"

namespace fusible {
namespace {

// Where rows are gathered, the addresses of each take registers of their own.
constexpr int blocks_per_multiprocessor(bool gather) { return gather ? 3 : 4; }

// How a thread reads its rows of a tile.
template <class T, bool kGather>
struct RowReader {
  const T* from;  // of the thread's features, of its first row
  int64_t pitch;
  int64_t tokens[kGather ? kTileRows : 1];

  DEVICE RowReader(const QuantizeRows& c, const TokenBlock& block, const TilePosition& at) : pitch(c.pitch) {
    from = static_cast<const T*>(c.x) + at.feature();
    if constexpr (kGather) {
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) {
        const int row = at.row() + i;
        tokens[i] = row < block.rows ? __ldg(&c.slot_of_row[block.first_row + row]) / c.top_k : 0;
      }
    } else {
      from += (block.first_row + at.row()) * pitch;
    }
  }
  DEVICE const T* row(int i) const { return from + (kGather ? tokens[i] : i) * pitch; }

  DEVICE void read(Tile<T>& tile, int64_t first_feature, const TileExtent& extent, const TilePosition& at) const {
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) tile.load(i, extent.has(at, i), row(i) + first_feature);
  }
};

template <class T, bool kRows, bool kColumns, bool kGather>
__global__ void __launch_bounds__(kQuantizeThreads, blocks_per_multiprocessor(kGather))
    quantize_rows_kernel(const __grid_constant__ QuantizeRows c, int chunks) {
  __shared__ ColumnsShared shared;
  const TokenBlock block = find_token_block(c.sizes, static_cast<int>(c.tokens), blockIdx.x / chunks);
  if (!block.rows) return;
  const TilePosition at;
  const RowReader<T, kGather> reader(c, block, at);
  const int64_t width = static_cast<int64_t>(c.tiles) * kScaleBlock, first = blockIdx.x % chunks * width;
  quantize_tokens<T, kRows, kColumns>(TokenCopies(c.rows, c.columns, c.features, block.number, block.first_row), at,
                                      block.rows, first, min(c.features, first + width), c.power_of_two, shared,
                                      [&](Tile<T>& tile, int64_t feature, const TileExtent& extent)
                                          INLINE { reader.read(tile, feature, extent, at); });
}

template <class T, bool kRows, bool kColumns>
void launch(const QuantizeRows& c, int device, cudaStream_t stream) {
  const TokenTiles tiles =
      token_tiles(c.tokens, c.sizes.groups, c.features, blocks_per_multiprocessor(c.slot_of_row), c.tiles, device);
  QuantizeRows call = c;
  call.tiles = tiles.of_block;
  call.rows.scales_pitch = row_scales_pitch(c.tokens);
  if (c.slot_of_row)
    quantize_rows_kernel<T, kRows, kColumns, true><<<tiles.blocks, kQuantizeThreads, 0, stream>>>(call, tiles.chunks);
  else
    quantize_rows_kernel<T, kRows, kColumns, false><<<tiles.blocks, kQuantizeThreads, 0, stream>>>(call, tiles.chunks);
}

}  // namespace

void quantize_rows(const QuantizeRows& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.features || !c.sizes.groups) return;
  const DeviceGuard guard(device);
  dispatch_dtype_of_16_bits(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    if (!c.columns.data) launch<T, true, false>(c, device, stream);
    else if (!c.rows.data) launch<T, false, true>(c, device, stream);
    else launch<T, true, true>(c, device, stream);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "quantising ", c.tokens, " rows of ", c.features, " features, ",
                     c.sizes.groups, " groups");
}

}  // namespace fusible
