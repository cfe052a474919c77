// SPDX-License-Identifier: Apache-2.0
// Activations and their backward that are quantised before they reach memory. A block takes 128 tokens of one group,
// and some tiles of 128 features one after the other.
#pragma once
#include "device/epilogue/epilogue_vectors.cuh"
#include "device/functions/column_numbers.cuh"
#include "device/quantize/quantize.cuh"
#include "device/rows/rows.cuh"
#include "device/rows/token_blocks.cuh"
#include "fusible/quantize_activation.h"

namespace fusible {

constexpr int kForwardBlocks = 3, kBackwardBlocks = 2;  // of a multiprocessor
constexpr int kForwardUnroll = 4, kBackwardUnroll = 2;  // rows whose loads are under way at once

// The scales of the block's rows into shared memory, which the next barrier makes visible.
DEVICE void read_scales(float (&to)[kScaleBlock], const RowScale& scales, const TokenBlock& block) {
  const int row = threadIdx.x;
  if (row < kScaleBlock)
    to[row] = scales.data && row < block.rows ? read_number(scales.data, scales.type, block.first_row + row) : 1.f;
}

template <class T>
DEVICE void read_values(float (&to)[8], const T* from) {
  convert_words<T>(to, ptx::load_vector_if(true, from));
}

// The layout of gate and up in a row: no up; blocks of whole vectors, so of whole tiles in the backward; or blocks of
// less than a vector, which alternate in sixteen neighbouring columns.
enum class Halves { kNone, kWide, kNarrow };

// A row's gates and ups of eight neighbouring features.
template <Halves kHalves, class T>
DEVICE void read_gate_and_up(float (&gate)[8], float (&up)[8], const T* from, unsigned block) {
  if constexpr (kHalves == Halves::kNarrow) {
    uint4 first = ptx::load_vector_if(true, from), second = ptx::load_vector_if(true, from + 8);
    separate(first, second, block);
    convert_words<T>(gate, first), convert_words<T>(up, second);
  } else {
    read_values(gate, from);
    if constexpr (kHalves == Halves::kWide) read_values(up, from + block);
  }
}
// The column where the gate of a feature begins in a row.
template <Halves kHalves>
DEVICE unsigned first_column(unsigned feature, unsigned block) {
  if constexpr (kHalves == Halves::kNone) return feature;
  else if constexpr (kHalves == Halves::kNarrow) return 2 * feature;
  else return gate_column(feature, block);
}

// A row of the tile, clamped to the last that exists, so that loads need no condition; likewise a feature.
DEVICE int row_that_exists(const TileExtent& extent, int row) { return min(row, extent.rows - 1); }
DEVICE int feature_that_exists(const TileExtent& extent, int feature) { return min(feature, extent.features - 8); }

// Asks for a tile that is read next, `pitch` elements from row to row: memory stays busy while this one is quantised. A
// thread has half of a row.
template <class T>
DEVICE void prefetch_tile(const T* tile, int64_t pitch, const TileExtent& extent) {
  const int row = threadIdx.x / 2, feature = threadIdx.x % 2 * (kScaleBlock / 2);
  ptx::prefetch_l2(tile + row_that_exists(extent, row) * pitch + feature_that_exists(extent, feature));
}

// The same of gates and ups.
template <Halves kHalves, class T>
DEVICE void prefetch_preact(const T* gate, int64_t pitch, unsigned block, const TileExtent& extent) {
  if constexpr (kHalves == Halves::kNarrow) {
    const TileExtent first{extent.rows, min(2 * extent.features, kScaleBlock)};
    prefetch_tile(gate, pitch, first);
    if (const int rest = 2 * extent.features - kScaleBlock; rest > 0)
      prefetch_tile(gate + kScaleBlock, pitch, TileExtent{extent.rows, rest});
  } else {
    prefetch_tile(gate, pitch, extent);
    if constexpr (kHalves == Halves::kWide) prefetch_tile(gate + block, pitch, extent);
  }
}

// Tiles that wait for their turn. So no registers wait, and a loop over rows need not be unrolled. A thread's part is
// put there by itself, or by a lane of its half warp.
struct WaitingTile {
  uint4 words[kTileRows][kQuantizeThreads];

  DEVICE void put(int row, const uint4& w, int thread = threadIdx.x) { words[row][thread] = w; }
  // Rows that do not exist, which were computed from others, become zeros.
  template <class T>
  DEVICE void take(Tile<T>& tile, const TilePosition& at, const TileExtent& extent) const {
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) tile.set(i, words[i][threadIdx.x]);
    if (extent.rows == kScaleBlock) return;
#pragma unroll
    for (int i = 0; i < kTileRows; ++i)
      if (at.row() + i >= extent.rows) tile.set(i, uint4{});
  }
};
// The tile that comes first makes room for columns.
union FirstTile {
  WaitingTile waiting;
  ColumnsShared columns;
};
struct ForwardShared {
  FirstTile first;
  float scales[kScaleBlock];
};
struct BackwardShared {
  FirstTile gate;
  WaitingTile up, postact;
  float sums[kTileRows][kQuantizeThreads];
  float scales[kScaleBlock];
};

// Stores the gradients of eight gates and ups of a row to the tiles of their columns: one tile each, or, if they
// alternate, the first 128 columns and the next 128, of which a thread has sixteen. These are the parts of two threads.
template <Halves kHalves>
DEVICE void put_gradients(BackwardShared& shared, int row, uint4 gate, uint4 up, int block, const TilePosition& at) {
  if constexpr (kHalves == Halves::kNarrow) {
    join(gate, up, block);
    WaitingTile& tile = at.c < 8 ? shared.gate.waiting : shared.up;
    const int thread = threadIdx.x - at.c + at.c % 8 * 2;
    tile.put(row, gate, thread), tile.put(row, up, thread + 1);
  } else {
    shared.gate.waiting.put(row, gate);
    if constexpr (kHalves == Halves::kWide) shared.up.put(row, up);
  }
}

// The numbers that a function reads for a thread's eight features, besides the scales of rows.
template <class Functions>
class TileNumbers {
 public:
  template <class Call>
  DEVICE TileNumbers(const Call& c, int group, unsigned feature) {
    if constexpr (Functions::kColumns > 0) {
      struct {
        const void* const* vectors;
        int columns, block;
      } source{c.vectors, static_cast<int>(c.features), static_cast<int>(c.activation.block)};
      ColumnNumbers<typename Functions::Columns, Functions::kNarrow> numbers;
      numbers.fetch(source, group, static_cast<int>(feature));
      numbers.convert_to(floats_);
    }
  }
  DEVICE FunctionNumbers<Functions::kColumns> of(float scale, int i) const {
    return FunctionNumbers<Functions::kColumns>(scale, floats_, ColumnFloats<0>(), i);
  }

 private:
  ColumnFloats<Functions::kColumns> floats_;
};

// Stores the sums, over 64 rows each, of the gradients of column numbers; a thread has the sums of its rows. Called by
// all threads of a block.
template <class Call, int kCount>
DEVICE void store_column_sums(const Call& c, const ColumnFloats<kCount>& sums, BackwardShared& shared,
                              const TokenBlock& block, const TilePosition& at, const TileExtent& extent,
                              int64_t feature) {
  auto& of_warps = reinterpret_cast<float (&)[kQuantizeWarps][kScaleBlock]>(shared.sums);
  const int column = threadIdx.x % kScaleBlock, end = threadIdx.x / kScaleBlock, warps = kQuantizeWarps / 2;
  const int64_t blocks = c.tokens / 64 + c.sizes.groups, number = block.first_row / 64 + block.group + end;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    __syncthreads();  // what stood there has been read
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float sum = sums.of[j][n] + __shfl_xor_sync(~0u, sums.of[j][n], 16);
      if (!at.half) of_warps[at.warp][at.feature() + n] = sum;
    }
    __syncthreads();
    float sum = 0.f;
    for (int warp = 0; warp < warps; ++warp) sum += of_warps[end * warps + warp][column];
    if (end * 64 < block.rows && column < extent.features)
      c.dvector_partials[(j * blocks + number) * c.features + feature + column] = sum;
  }
}

// Stores the wanted operands of a tile at `feature`. Called by all threads of a block.
template <class T>
DEVICE void quantize_tile(const Tile<T>& tile, const TokenCopies& to, const TilePosition& at, const TileExtent& extent,
                          int64_t feature, bool want_rows, bool want_columns, bool power_of_two,
                          ColumnsShared& shared) {
  if (want_rows)
    store_rows(tile, at, extent, power_of_two, to.rows.data + feature, to.features,
               to.rows.scales + feature / kScaleBlock * to.rows.scales_pitch);
  if (!want_columns) return;
  stage_and_scale_columns(tile, at, extent, power_of_two, shared, to.columns.scales + feature);
  __syncthreads();
  store_columns(shared.bytes, extent, to.columns.data + feature * kScaleBlock);
}

// Quantises the activation, for the tokens of a block of threads and some tiles of their features. Functions: a family
// of functions, as for epilogues in device/epilogue/epilogue_functions.cuh; it is chosen once per tile, not per
// element.
template <class T, Halves kHalves, class Functions, class Call>
DEVICE void quantize_activation(const Call& c, int chunks) {
  __shared__ ForwardShared shared;
  const TokenBlock block = token_block(c, chunks);
  if (!block.rows) return;
  const TilePosition at;
  read_scales(shared.scales, c.scales, block);
  __syncthreads();
  const unsigned up = static_cast<unsigned>(c.activation.block);
  const int pitch = static_cast<int>(c.features) * (kHalves == Halves::kNone ? 1 : 2);
  const T* rows = static_cast<const T*>(c.preact) + block.first_row * int64_t{pitch};
  const TokenCopies copies(c.rows, c.columns, c.features, block.number, block.first_row);
  const BlockFeatures in_block(c, chunks);
  const int64_t end = in_block.end(c);
  for (int64_t feature = in_block.first; feature < end; feature += kScaleBlock) {
    const TileExtent extent{block.rows, of_one_tile(end - feature)};
    const unsigned column = static_cast<unsigned>(feature) + feature_that_exists(extent, at.feature());
    const T* preact = rows + first_column<kHalves>(column, up);
    const TileNumbers<Functions> numbers(c, block.group, column);
    Functions::choose(c, [&](auto function) INLINE {
#pragma unroll kForwardUnroll
      for (int i = 0; i < kTileRows; ++i) {
        const T* from = preact + row_that_exists(extent, at.row() + i) * pitch;
        const float scale = Functions::kScales ? shared.scales[at.row() + i] : 1.f;
        float x[8], u[8], y[8];
        read_gate_and_up<kHalves>(x, u, from, up);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          y[n] = function.forward(x[n], kHalves == Halves::kNone ? 1.f : u[n], numbers.of(scale, n).values);
        }
        shared.first.waiting.put(i, rounded_words<T>(y));
      }
    });
    if (const int64_t next = feature + kScaleBlock; next < end) {
      const TileExtent coming{block.rows, of_one_tile(end - next)};
      const T* gate = rows + first_column<kHalves>(static_cast<unsigned>(next), up);
      prefetch_preact<kHalves>(gate, pitch, up, coming);
    }
    Tile<T> tile;
    shared.first.waiting.take(tile, at, extent);
    __syncthreads();
    quantize_tile(tile, copies, at, extent, feature, c.rows.data, c.columns.data, c.power_of_two, shared.first.columns);
    __syncthreads();
  }
}

// Likewise.
template <class T, Halves kHalves, class Functions, class Call>
DEVICE void quantize_activation_backward(const Call& c, int chunks, BackwardShared& shared) {
  const TokenBlock block = token_block(c, chunks);
  if (!block.rows) return;
  const TilePosition at;
  read_scales(shared.scales, c.scales, block);
  __syncthreads();
  const unsigned up = static_cast<unsigned>(c.activation.block);
  const int features = static_cast<int>(c.features), pitch = features * (kHalves == Halves::kNone ? 1 : 2);
  const T* preacts = static_cast<const T*>(c.preact) + block.first_row * pitch;
  const T* dpostacts = static_cast<const T*>(c.dpostact) + block.first_row * features;
  const TokenCopies preact_copies(c.rows, c.columns, pitch, block.number, block.first_row),
      postact_copies({}, c.postact_columns, c.features, block.number, block.first_row);
  const BlockFeatures in_block(c, chunks);
  const int64_t end = in_block.end(c);
  for (int64_t feature = in_block.first; feature < end; feature += kScaleBlock) {
    const TileExtent extent{block.rows, of_one_tile(end - feature)};
    const unsigned column = static_cast<unsigned>(feature), gate = first_column<kHalves>(column, up);
    const int column_of_thread = feature_that_exists(extent, at.feature());
    const T* preact = preacts + gate + column_of_thread * (kHalves == Halves::kNarrow ? 2 : 1);
    const T* dpostact = dpostacts + column + column_of_thread;
    const TileNumbers<Functions> numbers(c, block.group, column + column_of_thread);
    [[maybe_unused]] ColumnFloats<Functions::kSums> column_sums{};
    Functions::choose(c, [&](auto function) INLINE {
#pragma unroll kBackwardUnroll
      for (int i = 0; i < kTileRows; ++i) {
        const int row = row_that_exists(extent, at.row() + i);
        const float scale = Functions::kScales ? shared.scales[at.row() + i] : 1.f;
        float x[8], u[8], dy[8];
        read_gate_and_up<kHalves>(x, u, preact + row * pitch, up);
        read_values(dy, dpostact + row * features);
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const FunctionNumbers read = numbers.of(scale, n);
          const auto d = function.backward(x[n], kHalves == Halves::kNone ? 1.f : u[n], read.values, dy[n]);
          if constexpr (Functions::kScales) sum += d.dr[0];
          if constexpr (Functions::kSums > 0)
#pragma unroll
            for (int j = 0; j < Functions::kSums; ++j)
              column_sums.of[j][n] += at.row() + i < extent.rows ? d.dr[1 + j] : 0.f;
          x[n] = d.dx, u[n] = d.du, dy[n] = d.y;
        }
        shared.sums[i][threadIdx.x] = at.feature() < extent.features ? sum : 0.f;
        put_gradients<kHalves>(shared, i, rounded_words<T>(x), rounded_words<T>(u), up, at);
        shared.postact.put(i, rounded_words<T>(dy));
      }
    });
    if (c.dscales) {
      float sums[kTileRows];
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) sums[i] = shared.sums[i][threadIdx.x];
      const float sum = reduce_row(sums, at, [](float a, float b) INLINE { return a + b; });
      const int owned = at.row() + at.c / 2;
      if (at.c % 2 == 0 && owned < block.rows)
        c.workspace[feature / kScaleBlock * c.tokens + block.first_row + owned] = sum;
    }
    if constexpr (Functions::kSums > 0) store_column_sums(c, column_sums, shared, block, at, extent, feature);
    if (const int64_t next = feature + kScaleBlock; next < end) {
      const TileExtent coming{block.rows, of_one_tile(end - next)};
      const T* gate = preacts + first_column<kHalves>(static_cast<unsigned>(next), up);
      prefetch_preact<kHalves>(gate, pitch, up, coming);
      prefetch_tile(dpostacts + next, features, coming);
    }
    if constexpr (kHalves == Halves::kNarrow) __syncwarp();
    Tile<T> tile;
    shared.gate.waiting.take(tile, at, extent);
    __syncthreads();
    const auto quantize = [&](const TokenCopies& to, int64_t at_feature, bool want_rows, bool want_columns) INLINE {
      quantize_tile(tile, to, at, extent, at_feature, want_rows, want_columns, c.power_of_two, shared.gate.columns);
    };
    if constexpr (kHalves == Halves::kNarrow) {
      const auto quantize_columns = [&](int columns, int64_t first_column) INLINE {
        quantize_tile(tile, preact_copies, at, TileExtent{extent.rows, columns}, first_column, c.rows.data,
                      c.columns.data, c.power_of_two, shared.gate.columns);
      };
      quantize_columns(min(2 * extent.features, kScaleBlock), gate);
      if (const int rest = 2 * extent.features - kScaleBlock; rest > 0) {
        shared.up.take(tile, at, extent);
        quantize_columns(rest, gate + kScaleBlock);
      }
    } else {
      quantize(preact_copies, gate, c.rows.data, c.columns.data);
      if constexpr (kHalves == Halves::kWide) {
        shared.up.take(tile, at, extent);
        quantize(preact_copies, gate + up, c.rows.data, c.columns.data);
      }
    }
    if (c.postact_columns.data) {
      shared.postact.take(tile, at, extent);
      quantize(postact_copies, feature, false, true);
    }
    __syncthreads();
  }
}

}  // namespace fusible
