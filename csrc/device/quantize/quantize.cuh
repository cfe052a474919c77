// SPDX-License-Identifier: Apache-2.0
// Tiles of 128 x 128 values that are quantised to e4m3 in registers, with a scale for each row, for each column, or for
// the tile. Scales decode: value = byte * scale. Every rounding is the one of the reference (ops/quantized): division
// and products are IEEE's, whatever the flags of the compiler.
//
// Thread t of 256 has 8 features of 8 rows:
//
//   rows 16 w + 8 h + 0..7      of warp w and half h of its lanes
//   features 8 c + 0..7         of lane c of the half
//
// so that a half reads 256 bytes of one row at a time, and a thread has 8 neighbours of a column for the transposed
// bytes. They go through shared memory in units of 8 bytes, whose place within a feature is exclusive-or'ed with c:
// neither the stores of 8 bytes nor the loads of 16 meet in a bank.
#pragma once
#include "device/ptx/float8.cuh"
#include "device/ptx/vector.cuh"
#include "fusible/gemm_config.h"
#include "fusible/quantized_copies.h"

namespace fusible {

constexpr int kQuantizeThreads = 256, kQuantizeWarps = kQuantizeThreads / 32, kTileRows = 8;

// The factor that values are multiplied by, and the scale that is stored.
struct Encoding {
  float encode, decode;
};

template <class T>
DEVICE float largest_finite() {  // only bf16 and fp32 are small enough for the quotient to overflow
  return __uint_as_float(sizeof(T) == 2 ? 0x7F7F0000u : 0x7F7FFFFFu);
}

// The encoding of a block whose largest magnitude is `amax`. If that is not finite, the scale is NaN, so that products
// with the block become NaN.
template <class T>
DEVICE Encoding encoding_of(float amax, bool power_of_two) {
  if (!(amax < INFINITY)) return {1.f, __uint_as_float(0x7FC00000u)};
  float encode = amax == 0.f ? 1.f : __fdiv_rn(448.f, amax);
  if (encode == INFINITY) encode = largest_finite<T>();
  if (power_of_two) encode = __uint_as_float(__float_as_uint(encode) & 0x7F800000u);
  return {encode, __fdiv_rn(1.f, encode)};
}

// The power of two of a byte of e8m0; of 255 NaN.
DEVICE float from_e8m0(uint8_t exponent) {
  return __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7FC00000u : uint32_t{exponent} << 23);
}

// The rows of a thread. Magnitudes are compared as integers, in which NaN is above infinity: a maximum keeps it.
template <class T, int kRows = kTileRows>
struct Tile {
  static constexpr int kWords = 4;  // of a row, two features each
  uint32_t words[kRows][kWords];

  DEVICE void load(int row, bool exists, const T* from) { set(row, ptx::load_vector_if(exists, from)); }
  DEVICE void set(int row, const uint4& w) {
    words[row][0] = w.x, words[row][1] = w.y, words[row][2] = w.z, words[row][3] = w.w;
  }
  DEVICE void set(int row, const float (&v)[8]) {  // rounded
#pragma unroll
    for (int j = 0; j < 4; ++j) words[row][j] = ptx::pack<T>(v[2 * j], v[2 * j + 1]);
  }
  DEVICE float2 pair(int row, int j) const { return ptx::unpack<T>(words[row][j]); }
  DEVICE uint32_t magnitudes(int row, int j) const { return words[row][j] & 0x7FFF7FFFu; }

  DEVICE static uint32_t larger(uint32_t x, uint32_t y) { return ptx::max_u16x2(x, y); }
  // The larger of the two of a word, as a value.
  DEVICE static float largest(uint32_t x) { return ptx::unpack<T>(ptx::max_u16x2(x, x >> 16)).x; }
  // The half word of one feature.
  DEVICE static uint32_t of_feature(uint32_t word, int feature) { return feature % 2 ? word >> 16 : word & 0xFFFFu; }
};
template <int kRows>
struct Tile<float, kRows> {
  static constexpr int kWords = 8;
  float values[kRows][kWords];

  DEVICE void load(int row, bool exists, const float* from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = ptx::load_vector_if(exists, from + 4 * half);
      const uint32_t bits[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) values[row][4 * half + i] = __uint_as_float(bits[i]);
    }
  }
  DEVICE float2 pair(int row, int j) const { return {values[row][2 * j], values[row][2 * j + 1]}; }
  DEVICE uint32_t magnitudes(int row, int j) const { return __float_as_uint(values[row][j]) & 0x7FFFFFFFu; }

  DEVICE static uint32_t larger(uint32_t x, uint32_t y) { return x < y ? y : x; }
  DEVICE static float largest(uint32_t x) { return __uint_as_float(x); }
  DEVICE static uint32_t of_feature(uint32_t word, int) { return word; }
};

// The position of a thread in a tile.
struct TilePosition {
  int warp = threadIdx.x / 32, half = threadIdx.x % 32 / 16, c = threadIdx.x % 16;
  DEVICE int row() const { return 16 * warp + 8 * half; }
  DEVICE int feature() const { return 8 * c; }
};

// Shared memory of a block that transposes.
struct TransposedTile {
  uint2 units[kScaleBlock][16];  // [feature][8 rows]

  DEVICE static int swizzled(int unit, int c) { return unit ^ c; }
};

// The bytes of the thread's columns into shared memory; encode[f] of each of its features.
template <class T>
DEVICE void stage_columns(const Tile<T>& tile, const float (&encode)[8], TransposedTile& to, const TilePosition& at) {
  const int unit = TransposedTile::swizzled(2 * at.warp + at.half, at.c);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t bytes[2][2];  // [feature of the pair][four rows]
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      float2 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = tile.pair(4 * quad + i, j);
      const float low = encode[2 * j], high = encode[2 * j + 1];
      bytes[0][quad] = ptx::pack_e4m3(__fmul_rn(v[0].x, low), __fmul_rn(v[1].x, low)) |
                       ptx::pack_e4m3(__fmul_rn(v[2].x, low), __fmul_rn(v[3].x, low)) << 16;
      bytes[1][quad] = ptx::pack_e4m3(__fmul_rn(v[0].y, high), __fmul_rn(v[1].y, high)) |
                       ptx::pack_e4m3(__fmul_rn(v[2].y, high), __fmul_rn(v[3].y, high)) << 16;
    }
    to.units[at.feature() + 2 * j][unit] = {bytes[0][0], bytes[0][1]};
    to.units[at.feature() + 2 * j + 1][unit] = {bytes[1][0], bytes[1][1]};
  }
}

// store(feature, first row, 16 bytes) for all of the tile, each thread its share: eight neighbouring threads have the
// 128 rows of a feature.
template <class Store>
DEVICE void each_staged(const TransposedTile& from, Store store) {
#pragma unroll
  for (int round = 0; round < 4; ++round) {
    const int feature = 32 * round + threadIdx.x / 8, v = threadIdx.x % 8, c = feature / 8;
    const uint4 both = *reinterpret_cast<const uint4*>(&from.units[feature][2 * v ^ c & ~1]);
    store(feature, 16 * v, c % 2 ? uint4{both.z, both.w, both.x, both.y} : both);
  }
}

// The eight bytes of a row.
template <class T>
DEVICE uint2 row_bytes(const Tile<T>& tile, int row, float encode) {
  uint32_t bytes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 v = tile.pair(row, j);
    bytes[j] = ptx::pack_e4m3(__fmul_rn(v.x, encode), __fmul_rn(v.y, encode));
  }
  return {bytes[0] | bytes[1] << 16, bytes[2] | bytes[3] << 16};
}

// The largest magnitudes of a thread's part of a row.
template <class T, int kRows>
DEVICE uint32_t largest_word(const Tile<T, kRows>& tile, int row) {
  uint32_t most[Tile<T>::kWords];
#pragma unroll
  for (int j = 0; j < Tile<T>::kWords; ++j) most[j] = tile.magnitudes(row, j);
#pragma unroll
  for (int words = Tile<T>::kWords / 2; words; words /= 2)
#pragma unroll
    for (int j = 0; j < words; ++j) most[j] = Tile<T>::larger(most[2 * j], most[2 * j + 1]);
  return most[0];
}
// The largest word of a thread's part of the tile.
template <class T, int kRows>
DEVICE uint32_t largest_word(const Tile<T, kRows>& tile) {
  uint32_t most = largest_word(tile, 0);
#pragma unroll
  for (int i = 1; i < kRows; ++i) most = Tile<T>::larger(most, largest_word(tile, i));
  return most;
}

// The largest of all threads' words; each gets it.
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

// Reduces each of the half's eight rows over the lanes, and returns the result of row c / 2. Each exchange halves the
// number of rows per lane.
template <class V, class Reduce>
DEVICE V reduce_row(V (&of_rows)[kTileRows], const TilePosition& at, Reduce reduce) {
#pragma unroll
  for (int rows = 4; rows; rows /= 2) {
    const bool upper = at.c & 2 * rows;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const V mine = upper ? of_rows[i + rows] : of_rows[i], other = upper ? of_rows[i] : of_rows[i + rows];
      of_rows[i] = reduce(mine, __shfl_xor_sync(~0u, other, 2 * rows));
    }
  }
  return reduce(of_rows[0], __shfl_xor_sync(~0u, of_rows[0], 1));
}

// The largest of row c / 2, from the words that each lane has of the rows.
template <class T>
DEVICE float largest_of_row(uint32_t (&most)[kTileRows], const TilePosition& at) {
  return Tile<T>::largest(reduce_row(most, at, [](uint32_t a, uint32_t b) INLINE { return Tile<T>::larger(a, b); }));
}
// The encoding of that row in one tile.
template <class T>
DEVICE Encoding encoding_of_row(const Tile<T>& tile, const TilePosition& at, bool power_of_two) {
  uint32_t most[kTileRows];
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) most[i] = largest_word(tile, i);
  return encoding_of<T>(largest_of_row<T>(most, at), power_of_two);
}

// How many of those that are left a tile takes.
DEVICE int of_one_tile(int64_t left) { return static_cast<int>(min(left, int64_t{kScaleBlock})); }

// Rows of the tile that exist, and features.
struct TileExtent {
  int rows, features;

  // Whether a thread's row is one of them.
  DEVICE bool has(const TilePosition& at, int row) const { return at.row() + row < rows && at.feature() < features; }
};

// A tile of rows: bytes from `data` on, rows `pitch` bytes apart; scales of neighbouring rows are neighbours.
template <class T>
DEVICE void store_rows(const Tile<T>& tile, const TilePosition& at, const TileExtent& extent, bool power_of_two,
                       uint8_t* data, int64_t pitch, float* scales) {
  const Encoding mine = encoding_of_row(tile, at, power_of_two);
  const int owned = at.row() + at.c / 2;
  if (at.c % 2 == 0 && owned < extent.rows) scales[owned] = mine.decode;
  uint8_t* to = data + at.row() * pitch + at.feature();
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    const uint2 bytes = row_bytes(tile, i, __shfl_sync(~0u, mine.encode, 16 * at.half + 2 * i));
    ptx::store_vector_if(extent.has(at, i), to + i * pitch, bytes);
  }
}

// The largest magnitudes of the features in the rows of each warp, through shared memory.
template <class T>
struct ColumnMaxima {
  uint4 words[kQuantizeWarps][16][Tile<T>::kWords / 4];

  DEVICE void put(const Tile<T>& tile, const TilePosition& at) {
    uint32_t most[Tile<T>::kWords];
#pragma unroll
    for (int j = 0; j < Tile<T>::kWords; ++j) {
      most[j] = tile.magnitudes(0, j);
#pragma unroll
      for (int i = 1; i < kTileRows; ++i) most[j] = Tile<T>::larger(most[j], tile.magnitudes(i, j));
      most[j] = Tile<T>::larger(most[j], __shfl_xor_sync(~0u, most[j], 16));
    }
    if (at.half) return;
#pragma unroll
    for (int q = 0; q < Tile<T>::kWords / 4; ++q)
      words[at.warp][at.c][q] = {most[4 * q], most[4 * q + 1], most[4 * q + 2], most[4 * q + 3]};
  }
  // The largest word of a feature over all rows, after a barrier.
  DEVICE float largest(int feature) const {
    uint32_t word = 0;
#pragma unroll
    for (int w = 0; w < kQuantizeWarps; ++w)
      word = Tile<T>::larger(word, reinterpret_cast<const uint32_t*>(words[w])[feature * Tile<T>::kWords / 8]);
    return Tile<T>::largest(Tile<T>::of_feature(word, feature));
  }
};

// Shared memory of a block that writes columns of values of 16 bits.
struct ColumnsShared {
  TransposedTile bytes;
  ColumnMaxima<__nv_bfloat16> most;  // as many words for fp16
  float encode[kScaleBlock];
};

// Columns of a tile into shared memory, their scales to `scales`. By all threads of a block.
template <class T>
DEVICE void stage_and_scale_columns(const Tile<T>& tile, const TilePosition& at, const TileExtent& extent,
                                    bool power_of_two, ColumnsShared& shared, float* scales) {
  auto& most = reinterpret_cast<ColumnMaxima<T>&>(shared.most);
  most.put(tile, at);
  __syncthreads();
  if (threadIdx.x < kScaleBlock) {
    const int feature = threadIdx.x;
    const Encoding encoding = encoding_of<T>(most.largest(feature), power_of_two);
    shared.encode[feature] = encoding.encode;
    if (feature < extent.features) scales[feature] = encoding.decode;
  }
  __syncthreads();
  float encode[8];
  load(encode, shared.encode + at.feature());
  stage_columns(tile, encode, shared.bytes, at);
}

// The staged columns of a tile to data[features, 128].
DEVICE void store_columns(const TransposedTile& staged, const TileExtent& extent, uint8_t* data) {
  each_staged(staged, [&](int feature, int row, const uint4& bytes) INLINE {
    ptx::store_vector_if(feature < extent.features, data + feature * kScaleBlock + row, bytes);
  });
}

// Memory of the copies of a block's tokens, from its first token on. A copy that is not wanted is not touched.
struct TokenCopies {
  QuantizedRows rows;
  BlockedColumns columns;
  int64_t features;  // of all tiles

  DEVICE TokenCopies(const QuantizedRows& r, const BlockedColumns& c, int64_t features, int64_t block, int64_t row)
      : rows{r.data + row * features, r.scales + row, r.scales_pitch},
        columns{c.data + block * features * kScaleBlock, c.scales + block * features},
        features(features) {}
};

// Quantises the features from `first` to `end` of a block's tokens, tile by tile. read(tile, first feature, extent)
// fills a tile; it is called while the columns of the tile before are being stored. rows(tile, first feature, extent)
// stores the rows of a tile, columns(...) stages its columns.
template <class T, bool kRows, bool kColumns, class Read, class Rows, class Columns>
DEVICE void quantize_tokens(const TokenCopies& to, int count, int64_t first, int64_t end, ColumnsShared& shared,
                            Read read, Rows rows, Columns columns) {
  Tile<T> tile;
  TileExtent extent{count, 0};
  for (int64_t feature = first - kScaleBlock;; feature += kScaleBlock) {
    const int64_t next = feature + kScaleBlock;
    const TileExtent stored = extent;
    if (next < end) {
      extent.features = of_one_tile(end - next);
      read(tile, next, extent);
    }
    if (kColumns && feature >= first) {
      __syncthreads();
      store_columns(shared.bytes, stored, to.columns.data + feature * kScaleBlock);
    }
    if (next >= end) return;
    if constexpr (kRows) rows(tile, next, extent);
    if constexpr (kColumns) columns(tile, next, extent);
  }
}

}  // namespace fusible
