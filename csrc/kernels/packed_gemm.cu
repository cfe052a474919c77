// SPDX-License-Identifier: Apache-2.0
// A warp has 16 columns of a group's product, a block 64. It reads their weights once for each 32 rows of the group: a
// thread has pieces of two columns, and of the rows the same values of the depth. Which values of the depth a lane of a
// product holds does not matter, if those of both operands are the same.
#include <cuda_runtime.h>

#include "device/element.cuh"
#include "device/groups.cuh"
#include "device/packed.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/packed_gemm.h"
#include "fusible/wrong_sizes.h"

namespace fusible {
namespace {

constexpr int kWarps = 4, kColumns = 16 * kWarps, kRowTiles = 4, kRowsOfTile = 8;

constexpr int kAhead = 2;  // pieces on their way while one is multiplied

// What a thread reads of the weights at a time: of two columns, eight apart.
template <class Format>
struct Pieces {
  uint4 bytes[2];
  typename Format::Scales scales[2];
};

// Where a thread reads; a column that does not exist is read as the last one, and not stored.
template <class Format>
class PieceReader {
 public:
  DEVICE PieceReader(const PackedGemm& c, int64_t group, int64_t column) {
    const int64_t blocks = (c.k + Format::kScaleValues - 1) / Format::kScaleValues;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = group * c.n + min(column + i * 8, c.n - 1);
      bytes_[i] = c.b + row * (c.k / Format::kValues) * 16, scales_[i] = c.b_scales + row * blocks;
    }
  }
  // From value k on; zeros where there are none.
  DEVICE Pieces<Format> read(int k, bool wanted) const {
    Pieces<Format> pieces;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pieces.bytes[i] = ptx::load_vector_if(wanted, bytes_[i] + k / Format::kValues * 16);
      const auto* scales = reinterpret_cast<const typename Format::Scales*>(scales_[i] + k / Format::kScaleValues);
      pieces.scales[i] = wanted ? __ldg(scales) : 0;
    }
    return pieces;
  }

 private:
  const uint8_t *bytes_[2], *scales_[2];
};

template <class Format>
DEVICE void multiply_piece(float (&acc)[4], const uint32_t (&weights)[2][Format::kValues / 2],
                           const __nv_bfloat16* from, bool wanted) {
  uint32_t x[Format::kValues / 2];
#pragma unroll
  for (int i = 0; i < Format::kValues / 8; ++i) {
    const uint4 words = ptx::load_vector_if(wanted, from + i * 8);
    x[i * 4] = words.x, x[i * 4 + 1] = words.y, x[i * 4 + 2] = words.z, x[i * 4 + 3] = words.w;
  }
  Format::arrange(x);
#pragma unroll
  for (int i = 0; i < Format::kValues / 2; i += 2) {
    const uint32_t a[4] = {weights[0][i], weights[1][i], weights[0][i + 1], weights[1][i + 1]};
    ptx::warp_mma<__nv_bfloat16>(acc, a, x[i], x[i + 1]);
  }
}

DEVICE void write_result(const PackedGemm& c, int64_t group, int64_t token, int64_t column, float product) {
  float y = product * (c.alphas ? c.alphas[group] : 1.f);
  if (c.bias) {
    const float bias = read_number(c.bias, c.bias_type, group * c.n + column);
    y = fmaf(bias, c.bias_scale ? c.bias_scale[token] : 1.f, y);
  }
  write_number(c.out, c.output, token * c.out_pitch + column, c.row_scale ? y * c.row_scale[token] : y);
}

// The rows behind the last group, of the block's columns.
DEVICE void zero_rows(const PackedGemm& c, int64_t first) {
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x % kColumns;
  if (column >= c.n) return;
  for (int64_t token = first + threadIdx.x / kColumns; token < c.tokens; token += kWarps * 32 / kColumns)
    write_number(c.out, c.output, token * c.out_pitch + column, 0.f);
}

template <class Format>
__global__ void __launch_bounds__(kWarps * 32, 4) packed_gemm_kernel(const __grid_constant__ PackedGemm c) {
  const int group = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t start = rows_before(c.sizes, group, c.tokens);
  if (group == c.sizes.groups) {
    if (c.zero_tail) zero_rows(c, start);
    return;
  }
  const int64_t rows = clamped_size(c.sizes, group, c.tokens - start);
  const int64_t column = blockIdx.x * int64_t{kColumns} + warp * 16 + lane / 4;
  constexpr int kStep = 4 * Format::kValues;  // of the depth, by four threads
  const PieceReader<Format> reader(c, group, column);
  const int depth = static_cast<int>(c.k), begin = lane % 4 * Format::kValues;
  const auto* x = static_cast<const __nv_bfloat16*>(c.a) + (start + lane / 4) * c.a_pitch;
  const int64_t row_tile = kRowsOfTile * c.a_pitch;
  for (int64_t first = 0; first < rows; first += kRowTiles * kRowsOfTile) {
    const int tiles = static_cast<int>(min(int64_t{kRowTiles}, (rows - first + kRowsOfTile - 1) / kRowsOfTile));
    const int existing = static_cast<int>(min(rows - first, int64_t{kRowTiles * kRowsOfTile})) - lane / 4;
    float acc[kRowTiles][4] = {};
    Pieces<Format> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = reader.read(begin + i * kStep, begin + i * kStep < depth);
    for (int end = 0; end < depth; end += kAhead * kStep) {
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        const int k = begin + end + step * kStep, later = k + kAhead * kStep;
        if (end + step * kStep >= depth) break;
        const Pieces<Format> now = ahead[step];
        ahead[step] = reader.read(later, later < depth);
        uint32_t weights[2][Format::kValues / 2];
        Format::decode(now.bytes[0], now.scales[0], weights[0]);
        Format::decode(now.bytes[1], now.scales[1], weights[1]);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          if (i >= tiles) break;
          multiply_piece<Format>(acc[i], weights, x + i * row_tile + k, k < depth && i * kRowsOfTile < existing);
        }
      }
    }
    x += kRowTiles * row_tile;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t row = first + i * kRowsOfTile + lane % 4 * 2 + j % 2, of = column + j / 2 * 8;
        if (row < rows && of < c.n) write_result(c, group, start + row, of, acc[i][j] * Format::kFactor);
      }
  }
}

template <class Format>
void launch(PackedGemm c, cudaStream_t stream) {
  FUSIBLE_CHECK(c.k % Format::kValues == 0, "rows of packed weights must be multiples of 16 bytes, got k ", c.k);
  c.sizes.wrong = wrong_size_word(current_device());
  const dim3 grid(static_cast<unsigned>(blocks_of(c.n, kColumns)), static_cast<unsigned>(c.sizes.groups + 1));
  packed_gemm_kernel<Format><<<grid, kWarps * 32, 0, stream>>>(c);
}

}  // namespace

void packed_gemm(const PackedGemm& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.n) return;
  const DeviceGuard guard(device);
  c.format == PackedFormat::kMXFP8 ? launch<PackedE4M3>(c, stream) : launch<PackedE2M1>(c, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "a product of ", c.tokens, " rows and packed weights of ", c.n, " x ", c.k);
}

}  // namespace fusible
