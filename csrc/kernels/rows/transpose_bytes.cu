// SPDX-License-Identifier: Apache-2.0
// A block takes a tile of 128 x 128 bytes of one matrix. A thread reads 16 neighbours in each of four rows, and has in
// registers the four bytes of each of 16 columns, a word. Words go through shared memory in units of four, whose place
// within a column is exclusive-or'ed with the number of its 16 columns: neither the stores of 4 bytes nor the loads of
// 16 meet in a bank.
#include <cuda_runtime.h>

#include "device/ptx/vector.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_config.h"
#include "fusible/quantize.h"

namespace fusible {
namespace {

constexpr int kTile = 128, kThreads = 256, kRowsOfThread = 4;

// Loads sixteen bytes, of which the first `count` exist: none or all of them for vectors.
template <bool kVectors>
DEVICE uint4 load_bytes(const uint8_t* from, int64_t count) {
  if constexpr (kVectors) {
    return ptx::load_vector_if(count > 0, from);
  } else {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) words[i / 4] |= uint32_t{from[i]} << 8 * (i % 4);
    return {words[0], words[1], words[2], words[3]};
  }
}
template <bool kVectors>
DEVICE void store_bytes(uint8_t* to, int64_t count, const uint4& bytes) {
  if constexpr (kVectors) {
    ptx::store_vector_if(count > 0, to, bytes);
  } else {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) to[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
  }
}

// The columns of 4 x 4 bytes, whose rows are a, b, c and d.
DEVICE uint4 columns_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t left[2] = {ptx::permute<0x5140>(a, b), ptx::permute<0x5140>(c, d)},
                 right[2] = {ptx::permute<0x7362>(a, b), ptx::permute<0x7362>(c, d)};
  return {ptx::permute<0x5410>(left[0], left[1]), ptx::permute<0x7632>(left[0], left[1]),
          ptx::permute<0x5410>(right[0], right[1]), ptx::permute<0x7632>(right[0], right[1])};
}

struct ByteTile {
  uint4 units[kTile][kTile / 16];  // [column][16 rows]

  // Four rows from 4 * `quad` on, of the 16 columns from 16 * `c` on.
  DEVICE void put(const uint4 (&rows)[kRowsOfThread], int quad, int c) {
    const auto& [x, y, z, w] = rows;
    const uint4 columns[4] = {columns_of(x.x, y.x, z.x, w.x), columns_of(x.y, y.y, z.y, w.y),
                              columns_of(x.z, y.z, z.z, w.z), columns_of(x.w, y.w, z.w, w.w)};
#pragma unroll
    for (int j = 0; j < 16; ++j)
      reinterpret_cast<uint32_t*>(&units[16 * c + j][quad / 4 ^ c])[quad % 4] =
          reinterpret_cast<const uint32_t*>(columns)[j];
  }
  DEVICE const uint4& rows_of(int column, int unit) const { return units[column][unit ^ column / 16]; }
};

template <bool kVectors>
__global__ void __launch_bounds__(kThreads, 8) transpose_bytes_kernel(const TransposeBytes call) {
  __shared__ ByteTile tile;
  const int64_t matrix = blockIdx.z * call.rows * call.columns, first_row = int64_t{blockIdx.y} * kTile,
                first_column = int64_t{blockIdx.x} * kTile;
  const int part = threadIdx.x % 8, line = threadIdx.x / 8;  // 16 bytes of a line of 128
  const int64_t row = first_row + kRowsOfThread * line, column = first_column + 16 * part;
  const uint8_t* from = call.source + matrix + row * call.columns + column;
  uint4 rows[kRowsOfThread];
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i)
    rows[i] = load_bytes<kVectors>(from + i * call.columns, row + i < call.rows ? call.columns - column : 0);
  tile.put(rows, line, part);
  __syncthreads();
  uint8_t* to = call.out + matrix + first_row + 16 * part;
#pragma unroll
  for (int round = 0; round < kTile / 32; ++round) {
    const int of_tile = 32 * round + line;
    const int64_t stored = first_column + of_tile,
                  count = stored < call.columns ? call.rows - first_row - 16 * part : 0;
    store_bytes<kVectors>(to + stored * call.rows, count, tile.rows_of(of_tile, part));
  }
}

}  // namespace

void transpose_bytes(const TransposeBytes& c, int device, cudaStream_t stream) {
  if (!c.groups || !c.rows || !c.columns) return;
  const DeviceGuard guard(device);
  const dim3 grid(static_cast<unsigned>(blocks_of(c.columns, kTile)), static_cast<unsigned>(blocks_of(c.rows, kTile)),
                  static_cast<unsigned>(c.groups));
  if (vectors_fit(16, {c.rows, c.columns}, {c.source, c.out}))
    transpose_bytes_kernel<true><<<grid, kThreads, 0, stream>>>(c);
  else transpose_bytes_kernel<false><<<grid, kThreads, 0, stream>>>(c);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "transposing ", c.groups, " matrices of ", c.rows, " x ", c.columns);
}

}  // namespace fusible
