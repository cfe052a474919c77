// SPDX-License-Identifier: Apache-2.0
// The common part of fake quantisers: features in units, each of one warp at a time, and the rows of matrices.
#pragma once
#include "device/gemm/matrix_table.cuh"
#include "device/quantize/quantize_whole.cuh"
#include "device/rows/token_blocks.cuh"
#include "kernels/quantize/fake_quantize_launch.h"

namespace fusible {

// body(first feature) of each unit of `size` features that is this warp's.
template <class Body>
DEVICE void each_unit(const FeatureUnits& units, int size, int64_t features, Body body) {
  const int64_t first = static_cast<int64_t>(blockIdx.x % units.chunks) * units.of_block,
                end = min((first + units.of_block) * size, features);
  for (int64_t f = (first + threadIdx.x / 32) * size; f < end; f += kFakeWarps * size) body(f);
}

// The block of rows of a matrix that a block of threads takes.
struct MatrixRows {
  int64_t group, first;
  int rows;

  DEVICE MatrixRows(const FakeQuantizeWeight& c, int64_t first_group, int chunks, int size) {
    const int64_t number = blockIdx.x / chunks, of_matrix = (c.n + size - 1) / size;
    group = first_group + number / of_matrix, first = number % of_matrix * size;
    rows = static_cast<int>(min(c.n - first, int64_t{size}));
  }
};

// Four rows of a lane: row, row + kStep, ..., of a unit that lies anywhere and is stored densely.
template <class T, int kStep>
struct LaneRows {
  static constexpr int kRows = 4;
  const T* from[kRows];
  int64_t to, step;  // of the first, and from one to the next
  bool exists[kRows];

  // Row i is at source(i), and is stored as that with this number.
  template <class Source>
  DEVICE LaneRows(int row, int rows, int64_t first_stored, int64_t features, Source source)
      : to((first_stored + row) * features), step(kStep * features) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int mine = row + i * kStep;
      exists[i] = mine < rows, from[i] = source(exists[i] ? mine : 0);
    }
  }
  DEVICE void load(Tile<T, kRows>& tile, int64_t feature, bool has_feature) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) tile.load(i, exists[i] && has_feature, from[i] + feature);
  }
  DEVICE void store(uint16_t* out, int i, int64_t feature, bool has_feature, const uint4& values) const {
    ptx::store_vector_if(exists[i] && has_feature, out + to + i * step + feature, values);
  }
};

// The largest word of the lanes whose numbers differ only in these bits, in each of them.
template <class T>
DEVICE uint32_t largest_of_lanes(uint32_t word, int first_bit, int last_bit) {
#pragma unroll
  for (int bit = first_bit; bit <= last_bit; bit *= 2) word = Tile<T>::larger(word, __shfl_xor_sync(~0u, word, bit));
  return word;
}

}  // namespace fusible
