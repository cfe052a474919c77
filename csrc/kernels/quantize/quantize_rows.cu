// SPDX-License-Identifier: Apache-2.0
// A block takes 128 tokens of one group, and some tiles of 128 features one after another. It loads a tile while it
// stores the columns of the previous one. If scales span more than a tile, one kernel finds the largest magnitudes, and
// another casts.
#include <cuda_runtime.h>

#include "device/ptx/element.cuh"
#include "device/quantize/quantize_whole.cuh"
#include "device/rows/token_blocks.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "kernels/quantize/quantize_launch.h"

namespace fusible {
namespace {

// How a thread reads its rows of a tile.
template <class T, bool kGather>
struct RowReader {
  static constexpr int kBlocks = kGather ? 3 : 4;  // on a multiprocessor: addresses of gathered rows take registers

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

// The same for rows of e4m3: their values, rounded to bfloat16, which represents all but the smallest exactly.
struct ByteReader {
  static constexpr int kBlocks = 4;

  const uint8_t *from, *exponents;  // of the thread's features, and of its first row
  int64_t pitch;

  DEVICE ByteReader(const QuantizeRows& c, const TokenBlock& block, const TilePosition& at) : pitch(c.pitch) {
    const int64_t before = (block.first_row + at.row()) * pitch;
    from = static_cast<const uint8_t*>(c.x) + before + at.feature();
    exponents = c.exponents + before;
  }

  DEVICE void read(Tile<__nv_bfloat16>& tile, int64_t first_feature, const TileExtent& extent,
                   const TilePosition& at) const {
    uint2 bytes[kTileRows] = {};
    uint8_t exponent[kTileRows] = {};
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      if (!extent.has(at, i)) continue;
      bytes[i] = __ldg(reinterpret_cast<const uint2*>(from + i * pitch + first_feature));
      exponent[i] = __ldg(exponents + i * pitch + first_feature / kScaleBlock);
    }
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const float scale = from_e8m0(exponent[i]);
      float values[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = ptx::unpack_e4m3((j < 2 ? bytes[i].x : bytes[i].y) >> 16 * (j % 2));
        values[2 * j] = __fmul_rn(pair.x, scale), values[2 * j + 1] = __fmul_rn(pair.y, scale);
      }
      tile.set(i, values);
    }
  }
};

template <class T, bool kRows, bool kColumns, class Reader>
__global__ void __launch_bounds__(kQuantizeThreads, Reader::kBlocks)
    quantize_rows_kernel(const __grid_constant__ QuantizeRows c, int chunks) {
  __shared__ ColumnsShared shared;
  const TokenBlock block = token_block(c, chunks);
  if (!block.rows) return;
  const TilePosition at;
  const Reader reader(c, block, at);
  const BlockFeatures in_block(c, chunks);
  const TokenCopies to(c.rows, c.columns, c.features, block.number, block.first_row);
  quantize_tokens<T, kRows, kColumns>(
      to, block.rows, in_block.first, in_block.end(c), shared,
      [&](Tile<T>& tile, int64_t feature, const TileExtent& extent) INLINE { reader.read(tile, feature, extent, at); },
      [&](const Tile<T>& tile, int64_t feature, const TileExtent& extent) INLINE {
        store_rows(tile, at, extent, c.power_of_two, to.rows.data + feature, to.features,
                   to.rows.scales + feature / kScaleBlock * to.rows.scales_pitch);
      },
      [&](const Tile<T>& tile, int64_t feature, const TileExtent& extent)
          INLINE { stage_and_scale_columns(tile, at, extent, c.power_of_two, shared, to.columns.scales + feature); });
}

// The largest magnitudes of groups, or of those rows and columns that are wanted.
template <class T, bool kGather>
__global__ void __launch_bounds__(kQuantizeThreads, RowReader<T, kGather>::kBlocks)
    amax_of_rows_kernel(const __grid_constant__ QuantizeRows c, const Maxima maxima, int chunks) {
  __shared__ ColumnMaxima<T> shared;
  const TokenBlock block = token_block(c, chunks);
  if (!block.rows) return;
  const TilePosition at;
  const RowReader<T, kGather> reader(c, block, at);
  const BlockFeatures in_block(c, chunks);
  const bool columns = maxima.columns && c.columns.data;
  const int64_t end = in_block.end(c);
  uint32_t most[kTileRows] = {};
  for (int64_t feature = in_block.first; feature < end; feature += kScaleBlock) {
    const TileExtent extent{block.rows, of_one_tile(end - feature)};
    Tile<T> tile;
    reader.read(tile, feature, extent, at);
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) most[i] = Tile<T>::larger(most[i], largest_word(tile, i));
    if (!columns) continue;
    __syncthreads();
    shared.put(tile, at);
    __syncthreads();
    if (const int f = threadIdx.x; f < extent.features)
      raise(maxima.columns + block.group * c.features + feature + f, shared.largest(f));
  }
  if (maxima.groups) {
    uint32_t word = most[0];
#pragma unroll
    for (int i = 1; i < kTileRows; ++i) word = Tile<T>::larger(word, most[i]);
    const float amax = largest_of_block<T>(word);
    if (threadIdx.x == 0) raise(maxima.groups + block.group, amax);
  } else if (c.rows.data) {
    const float amax = largest_of_row<T>(most, at);
    const int owned = at.row() + at.c / 2;
    if (at.c % 2 == 0 && owned < block.rows) raise(maxima.rows + block.first_row + owned, amax);
  }
}

template <class T, bool kRows, bool kColumns, bool kGather>
__global__ void __launch_bounds__(kQuantizeThreads, RowReader<T, kGather>::kBlocks)
    cast_rows_kernel(const __grid_constant__ QuantizeRows c, const Maxima maxima, int chunks) {
  __shared__ ColumnsShared shared;
  __shared__ float encode_of_row[kScaleBlock];
  const TokenBlock block = token_block(c, chunks);
  if (!block.rows) return;
  const TilePosition at;
  const RowReader<T, kGather> reader(c, block, at);
  const BlockFeatures in_block(c, chunks);
  const TokenCopies to(c.rows, c.columns, c.features, block.number, block.first_row);
  const WholeScales scales{c.power_of_two, c.encode};
  const int t = threadIdx.x;
  if (kRows && t < block.rows) {
    const uint32_t amax = maxima.groups ? maxima.groups[block.group] : maxima.rows[block.first_row + t];
    const Encoding encoding = scales.of<T>(amax, block.group);
    encode_of_row[t] = encoding.encode;
    if (in_block.first == 0) to.rows.scales[t] = encoding.decode;
  }
  __syncthreads();
  quantize_tokens<T, kRows, kColumns>(
      to, block.rows, in_block.first, in_block.end(c), shared,
      [&](Tile<T>& tile, int64_t feature, const TileExtent& extent) INLINE { reader.read(tile, feature, extent, at); },
      [&](const Tile<T>& tile, int64_t feature, const TileExtent& extent)
          INLINE { store_scaled_rows(tile, at, extent, encode_of_row, to.rows.data + feature, to.features); },
      [&](Tile<T>& tile, int64_t feature, const TileExtent& extent) INLINE {
        if (t < extent.features) {
          const uint32_t amax =
              maxima.groups ? maxima.groups[block.group] : maxima.columns[block.group * c.features + feature + t];
          const Encoding encoding = scales.of<T>(amax, block.group);
          shared.encode[t] = encoding.encode;
          to.columns.scales[feature + t] = encoding.decode;
        }
        __syncthreads();
        float encode[8];
        load(encode, shared.encode + at.feature());
        convert_again(tile);
        stage_columns(tile, encode, shared.bytes, at);
      });
}

// Completes a call, and returns its grid.
template <class Reader>
TokenTiles grid_of(QuantizeRows& c, int device) {
  const TokenTiles tiles = token_tiles(c.tokens, c.sizes.groups, c.features, Reader::kBlocks, device);
  c.tiles = tiles.of_block;
  c.rows.scales_pitch = row_scales_pitch(c.tokens);
  return tiles;
}

void launch_bytes(QuantizeRows c, int device, cudaStream_t stream) {
  const TokenTiles tiles = grid_of<ByteReader>(c, device);
  quantize_rows_kernel<__nv_bfloat16, false, true, ByteReader>
      <<<tiles.blocks, kQuantizeThreads, 0, stream>>>(c, tiles.chunks);
}

template <class T, bool kRows, bool kColumns, bool kGather>
void launch(QuantizeRows c, int device, cudaStream_t stream) {
  using Reader = RowReader<T, kGather>;
  const TokenTiles tiles = grid_of<Reader>(c, device);
  if (c.scaling == Scaling::kBlocks) {
    quantize_rows_kernel<T, kRows, kColumns, Reader><<<tiles.blocks, kQuantizeThreads, 0, stream>>>(c, tiles.chunks);
    return;
  }
  const Maxima maxima(c.scaling, c.amax, c.tokens);
  const int64_t count = largest_magnitudes(c.scaling, c.tokens, c.sizes.groups, c.features);
  FUSIBLE_CUDA_CHECK(cudaMemsetAsync(c.amax, 0, count * sizeof(float), stream), "zeroing ", count, " magnitudes");
  amax_of_rows_kernel<T, kGather><<<tiles.blocks, kQuantizeThreads, 0, stream>>>(c, maxima, tiles.chunks);
  cast_rows_kernel<T, kRows, kColumns, kGather><<<tiles.blocks, kQuantizeThreads, 0, stream>>>(c, maxima, tiles.chunks);
}

template <class T, bool kGather>
void launch_wanted(const QuantizeRows& c, int device, cudaStream_t stream) {
  if (!c.columns.data) launch<T, true, false, kGather>(c, device, stream);
  else if (!c.rows.data) launch<T, false, true, kGather>(c, device, stream);
  else launch<T, true, true, kGather>(c, device, stream);
}

}  // namespace

void quantize_rows(const QuantizeRows& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.features || !c.sizes.groups) return;
  const DeviceGuard guard(device);
  if (c.exponents) launch_bytes(c, device, stream);
  else
    dispatch_dtype_of_16_bits(c.type, [&](auto type) {
      using T = Element<decltype(type)::value>;
      c.slot_of_row ? launch_wanted<T, true>(c, device, stream) : launch_wanted<T, false>(c, device, stream);
    });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "quantising ", c.tokens, " rows of ", c.features, " features, ",
                     c.sizes.groups, " groups");
}

}  // namespace fusible
