// SPDX-License-Identifier: Apache-2.0
// The epilogue of a complete accumulator. A consumer rounds its rows to the output's type and writes them to shared
// memory (`store_to_smem`); a thread of the producer's warpgroup stores them from there (`store_part`) while the
// consumer multiplies the next tile.
//
// The unit is a subtile of 64 rows x 128 bytes, swizzled as TMA wants it. Subtiles are handed over in parts: all that
// belong to 64 rows if two such parts fit; else one by one, reusing the memory.
#pragma once
#include "device/gemm/tile_scheduler.cuh"
#include "device/ptx/barrier.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/tma.cuh"

namespace fusible {

constexpr int kSubtileBytes = 64 * 128, kConsumers = 2;

struct NoColumnScales {};
template <int kTileN>
struct ColumnScales {
  float column_scale[kTileN];  // of the product
};
// The bias and scales that one tile needs, in shared memory; column scales only if the operands' rows have scales.
template <int kTileM, int kTileN, bool kScalesColumns>
struct EpilogueStage : std::conditional_t<kScalesColumns, ColumnScales<kTileN>, NoColumnScales> {
  float bias[kTileN];
  float scale[kTileM], bias_scale[kTileM];  // of the product and of the bias, for each row
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a subtile.
DEVICE int in_subtile(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// A consumer's output stages of kRows rows x kTileN values of Out, in kBytes. A consumer hands over a whole stage if
// two fit or a whole warp stores it; otherwise a subtile, so that it can write the next while that is stored.
template <class Out, int kTileN, int kBytesValue, int kRowsValue, bool kWholeWarp>
struct SmemOutLayout {
  static constexpr int kRows = kRowsValue, kSubtileBytes = kRows * 128;
  static constexpr int kSubtiles = kTileN * static_cast<int>(sizeof(Out)) / 128, kSubtileColumns = 128 / sizeof(Out);
  static constexpr int kBytes = kBytesValue;
  static constexpr bool kWhole = sizeof(Out) == 2 && (kWholeWarp || kBytes > kSubtiles * kSubtileBytes);
  static constexpr int kParts = kWhole ? 1 : kSubtiles, kSubtilesPerPart = kSubtiles / kParts,
                       kPartBytes = kSubtilesPerPart * kSubtileBytes;
  static constexpr int kSlots = kBytes / kPartBytes;
};

// Writes one part of the accumulator to shared memory, or (kAdd) its sum with the values there, rounded once. wgmma.cuh
// says which thread holds which elements.
template <class Layout, class Out, bool kAdd = false, int kSize>
DEVICE void store_to_smem(const float (&acc)[kSize], uint8_t* to, int part, int warp, int lane) {
  const uint32_t base = ptx::smem_address(to);
  if constexpr (sizeof(Out) == 2) {
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int subtile = 0; subtile < Layout::kSubtilesPerPart; ++subtile)
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {  // 16 columns: two vectors, upper and lower rows of each
        const float* x = acc + ((part * Layout::kSubtilesPerPart + subtile) * 4 + quad) * 8;
        const uint32_t at = base + subtile * kSubtileBytes + in_subtile(row, quad * 2 + lane / 16);
        uint32_t words[4];
        if constexpr (kAdd) ptx::load_matrix_x4(words, at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 old = kAdd ? ptx::unpack<Out>(words[i]) : float2{};
          words[i] =
              kAdd ? ptx::pack<Out>(old.x + x[i * 2], old.y + x[i * 2 + 1]) : ptx::pack<Out>(x[i * 2], x[i * 2 + 1]);
        }
        ptx::store_matrix_x4(at, words);
      }
  } else {
    // 32 columns: four vectors. Odd rows write the vectors 0 and 2, 1 and 3 in the other order, so that the four rows
    // that a half warp writes at a time lie in different banks.
    const int row = warp * 16 + lane / 4;
    const bool odd = row & 1;
#pragma unroll
    for (int vector = 0; vector < 2; ++vector)
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const float *even_row = acc + (part * 4 + vector + turn * 2) * 4,
                    *odd_row = acc + (part * 4 + vector + (1 - turn) * 2) * 4;
        const int chunk = (vector + (odd ? 1 - turn : turn) * 2) * 2 + lane % 4 / 2;
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const uint32_t at = base + in_subtile(row + lower * 8, chunk) + lane % 2 * 8;
          const float2 old = kAdd ? ptx::load_shared(at) : float2{};
          const float x = odd ? odd_row[lower * 2] : even_row[lower * 2],
                      y = odd ? odd_row[lower * 2 + 1] : even_row[lower * 2 + 1];
          ptx::store_shared(at, kAdd ? old.x + x : x, kAdd ? old.y + y : y);
        }
      }
  }
}

// acc = scale * column_scale * acc + bias_scale * bias, for the 64 rows of the tile that begin at `first`, and for
// kColumns of its columns: part number `part`.
template <int kColumns, int kTileM, int kTileN, bool kScalesColumns>
DEVICE void apply(const EpilogueStage<kTileM, kTileN, kScalesColumns>& stage, float (&acc)[kTileN / 2], int part,
                  int first, int warp, int lane) {
  const int row = first + warp * 16 + lane / 4;
  const float scale[2] = {stage.scale[row], stage.scale[row + 8]},
              of_bias[2] = {stage.bias_scale[row], stage.bias_scale[row + 8]};
#pragma unroll
  for (int vector = part * (kColumns / 8); vector < (part + 1) * (kColumns / 8); ++vector) {
    const float2 bias = *reinterpret_cast<const float2*>(&stage.bias[vector * 8 + lane % 4 * 2]);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      float* x = acc + vector * 4 + lower * 2;
      if constexpr (kScalesColumns) {
        const float2 of_column = *reinterpret_cast<const float2*>(&stage.column_scale[vector * 8 + lane % 4 * 2]);
        x[0] *= of_column.x, x[1] *= of_column.y;
      }
      x[0] = fmaf(x[0], scale[lower], bias.x * of_bias[lower]);
      x[1] = fmaf(x[1], scale[lower], bias.y * of_bias[lower]);
    }
  }
}

// Fills a stage for one tile; by one warp.
template <int kTileM, int kTileN, bool kScalesColumns>
DEVICE void fill(EpilogueStage<kTileM, kTileN, kScalesColumns>& stage, const EpilogueParams& source,
                 const WorkTile& tile, int lane) {
  for (int i = lane; i < kTileN; i += 32) {
    int column = tile.column * kTileN + i;
    bool exists = column < source.columns;
    if (source.half) {  // as many columns of either half
      const int within = tile.column * (kTileN / 2) + i % (kTileN / 2);
      exists = within < source.half;
      column = within + (i < kTileN / 2 ? 0 : source.half);
    }
    float bias = 0.f;
    if ((source.bias || source.biases) && exists) {
      const void* biases = source.biases ? source.biases[tile.group] : source.bias;
      const int64_t at = source.biases ? column : tile.group * source.bias_pitch + column;
      bias = read_number(biases, source.bias_type, at);
    }
    stage.bias[i] = bias;
    if constexpr (kScalesColumns) {
      const OperandScales& scales = source.operands;
      stage.column_scale[i] = exists ? scales.of_b[tile.group * scales.b_group + column * scales.b_row] : 0.f;
    }
  }
  const float alpha = source.alphas ? source.alphas[tile.group] : source.alpha;
  for (int i = lane; i < kTileM; i += 32) {
    const bool exists = i < tile.rows;
    const int token = tile.tokens_start + tile.row + i;
    const float scale = exists && source.row_scale ? source.row_scale[token] : 1.f;
    stage.scale[i] = scale * alpha;
    if constexpr (kScalesColumns)
      if (exists) stage.scale[i] *= source.operands.of_a[token];
    stage.bias_scale[i] = exists && source.bias_scale ? scale * source.bias_scale[token] : scale;
  }
}

// One part of an output stage, as the thread that stores it sees it. The output map has three dimensions for rows
// (tensor_map.h); rows that do not exist are out of bounds there, and TMA drops them.
struct Destination {
  const CUtensorMap* map;
  uint64_t policy;  // for the L2 cache
  int column;       // first output column
  int map_row[3];   // coordinates of the first row in the map
  bool accumulate;  // add to the existing values
};
// Loads the existing values of a part to shared memory; completes on `barrier`. Only for maps of matrices: bytes before
// a token buffer may not be readable.
template <class Layout>
DEVICE void load_part(const Destination& d, uint8_t* to, int part, uint64_t* barrier) {
  barrier_arrive_expecting(barrier, Layout::kPartBytes);
#pragma unroll
  for (int i = 0; i < Layout::kSubtilesPerPart; ++i) {
    const int column = d.column + (part * Layout::kSubtilesPerPart + i) * Layout::kSubtileColumns;
    tma::load(d.map, barrier, to + i * kSubtileBytes, column, d.map_row[0], d.map_row[1], d.map_row[2]);
  }
}
template <class Layout>
DEVICE void store_part(const Destination& d, const uint8_t* from, int part) {
#pragma unroll
  for (int i = 0; i < Layout::kSubtilesPerPart; ++i) {
    const int column = d.column + (part * Layout::kSubtilesPerPart + i) * Layout::kSubtileColumns;
    if (d.accumulate)
      tma::add(d.map, from + i * Layout::kSubtileBytes, d.policy, column, d.map_row[0], d.map_row[1], d.map_row[2]);
    else
      tma::store(d.map, from + i * Layout::kSubtileBytes, d.policy, column, d.map_row[0], d.map_row[1], d.map_row[2]);
  }
  tma::commit();
}

// A part whose first columns belong to one half of a row and as many to the other one: the map has a dimension for the
// half (tensor_map.h), and `column` counts within it.
struct HalvesDestination : Destination {};
template <class Layout>
DEVICE void store_part(const HalvesDestination& d, const uint8_t* from, int part) {
  constexpr int kOfHalf = Layout::kSubtiles / 2;
#pragma unroll
  for (int i = 0; i < Layout::kSubtilesPerPart; ++i) {
    const int subtile = part * Layout::kSubtilesPerPart + i;
    const int column = d.column / 2 + subtile % kOfHalf * Layout::kSubtileColumns;
    tma::store(d.map, from + i * Layout::kSubtileBytes, d.policy, column, subtile / kOfHalf, d.map_row[0],
               d.map_row[1]);
  }
  tma::commit();
}

}  // namespace fusible
