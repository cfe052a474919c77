// SPDX-License-Identifier: Apache-2.0
// A block has 16 columns of a group's product, whose depth its four warps split. It reads their weights once for each
// 16 rows of the group: a thread has pieces of two columns, and of the rows the same values of the depth. The values of
// the depth that a lane holds do not matter, if both operands use the same.
#include <cuda_runtime.h>

#include "device/gemm/groups.cuh"
#include "device/gemm/packed.cuh"
#include "device/ptx/element.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/packed_gemm.h"
#include "fusible/wrong_sizes.h"

namespace fusible {
namespace {

constexpr int kWarps = 4, kColumns = 16, kRowTiles = 2, kRowsOfTile = 8, kPieces = 2;
constexpr int kStretch = 64 * kPieces, kStep = kStretch * kWarps;  // bytes of a row: of a warp, and of the block

DEVICE void write_result(const PackedGemm& c, int64_t group, int64_t token, int64_t column, float product) {
  float y = product * (c.alphas ? c.alphas[group] : 1.f);
  if (c.bias) {
    const float bias = read_number(c.bias, c.bias_type, group * c.n + column);
    y = fmaf(bias, c.bias_scale ? c.bias_scale[token] : 1.f, y);
  }
  write_number(c.out, c.output, token * c.out_pitch + column, c.row_scale ? y * c.row_scale[token] : y);
}

// A thread's pieces of two columns in a stretch.
template <class Format>
struct Stretch {
  uint4 bytes[kPieces][2];
  typename Format::Scales scales[kPieces][2];
};

// The next read addresses of a thread, for columns eight apart; a column that does not exist is read as the last one
// and not stored.
template <class Format>
struct Cursor {
  const uint8_t *bytes[2], *scales[2];

  DEVICE Cursor(const PackedGemm& c, int group, int64_t column) {
    const int64_t blocks = (c.k + Format::kScaleValues - 1) / Format::kScaleValues,
                  row_bytes = c.k / Format::kValues * 16;
    const int first = threadIdx.x / 32 * kStretch + threadIdx.x % 4 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = group * c.n + min(column + i * 8, c.n - 1);
      bytes[i] = c.b + row * row_bytes + first;
      scales[i] = c.b_scales + row * blocks + first / 16 * Format::kValues / Format::kScaleValues;
    }
  }
  static constexpr int kPieceScales = 64 / 16 * Format::kValues / Format::kScaleValues;  // bytes from piece to piece
  DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < 2; ++i) bytes[i] += kStep, scales[i] += kPieceScales * kPieces * kWarps;
  }
};

// The depth of a row as a warp reads it: whole stretches, and behind them perhaps a part of one.
struct Depth {
  int whole, left;  // bytes of the last, from this thread's first piece on

  template <class Format>
  DEVICE static Depth of(const PackedGemm& c, Format) {
    const int bytes = static_cast<int>(c.k / Format::kValues * 16),
              mine = bytes - static_cast<int>(threadIdx.x / 32) * kStretch;
    const int whole = mine < kStretch ? 0 : (mine - kStretch) / kStep + 1;
    return {whole, mine - whole * kStep - static_cast<int>(threadIdx.x % 4 * 16)};
  }
  DEVICE int stretches() const { return whole + (left + static_cast<int>(threadIdx.x % 4 * 16) > 0); }
  DEVICE bool exists(int stretch, int piece) const {
    return stretch < whole || (stretch == whole && piece * 64 < left);
  }
};

// Stretches on their way in registers.
template <class Format, int kStages>
class InRegisters {
 public:
  static constexpr int kDepth = kStages, kUnrolled = kStages, kSharedBytes = 0;
  DEVICE InRegisters(const Cursor<Format>& cursor, const Depth& depth) : cursor_(cursor), depth_(depth) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) read(i, i);
  }
  DEVICE const Stretch<Format>& take(int slot) const { return ahead_[slot]; }
  DEVICE void give_back(int slot, int stretch) { read(slot, stretch + kDepth); }

 private:
  DEVICE void read(int slot, int stretch) {
    if (stretch < depth_.whole) {
      load<true>(ahead_[slot], stretch);
    } else {
      load<false>(ahead_[slot], stretch);
    }
    cursor_.advance();
  }
  template <bool kWhole>
  DEVICE void load(Stretch<Format>& to, int stretch) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool exists = kWhole || depth_.exists(stretch, piece);
        const uint8_t* from = cursor_.bytes[i] + piece * 64;
        to.bytes[piece][i] = !exists ? uint4{} : ptx::load_vector_once(from);
        const uint8_t* scales = cursor_.scales[i] + piece * Cursor<Format>::kPieceScales;
        to.scales[piece][i] = !exists ? 0 : __ldg(reinterpret_cast<const typename Format::Scales*>(scales));
      }
  }
  Cursor<Format> cursor_;
  Depth depth_;
  Stretch<Format> ahead_[kDepth];
};

DEVICE void multiply_eight(float (&acc)[4], const uint32_t (&w)[2][4], const uint4& x) {
  const uint32_t first[] = {w[0][0], w[1][0], w[0][1], w[1][1]}, second[] = {w[0][2], w[1][2], w[0][3], w[1][3]};
  ptx::warp_mma<__nv_bfloat16>(acc, first, x.x, x.y);
  ptx::warp_mma<__nv_bfloat16>(acc, second, x.z, x.w);
}

// The rows of a group that are multiplied at a time. A row that does not exist is read as the last one, and not stored.
struct Rows {
  const __nv_bfloat16* x[kRowTiles];  // this thread's next piece of its row of each tile
  int tiles;

  DEVICE Rows(const PackedGemm& c, int64_t start, int rows, int values) {
    tiles = (rows + kRowsOfTile - 1) / kRowsOfTile;
    const int lane = threadIdx.x % 32,
              first = static_cast<int>(threadIdx.x / 32 * kStretch + lane % 4 * 16) / 16 * values;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int row = min(i * kRowsOfTile + lane / 4, rows - 1);
      x[i] = static_cast<const __nv_bfloat16*>(c.a) + (start + row) * c.a_pitch + first;
    }
  }
};

// Decides whether the sums of a row of weights are NaN.
struct Largest {
  uint32_t magnitudes = 0, scale = 0;
};

// Pieces of two columns times the same values of the rows. `kWhole`: they exist, and one product scales them.
template <class Format, int kTiles, bool kWhole>
DEVICE void add_piece(float (&acc)[kTiles][4], const uint4 (&bytes)[2], const typename Format::Factors (&factors)[2],
                      const Rows& rows, int skipped, bool exists, Largest (&largest)[2]) {
  const auto read = [&](int tile, int i) INLINE {
    const auto* from = rows.x[tile] + skipped + i * 8;
    return kWhole ? __ldg(reinterpret_cast<const uint4*>(from)) : ptx::load_vector_if(exists, from);
  };
  uint4 x[kWhole ? Format::kValues / 8 : 1];  // of the first eight rows, which most groups do not exceed
  if constexpr (kWhole) {
#pragma unroll
    for (int i = 0; i < Format::kValues / 8; ++i) x[i] = read(0, i);
  }
#pragma unroll(kWhole ? Format::kValues / 8 : 1)
  for (int i = 0; i < Format::kValues / 8; ++i) {
    uint32_t weights[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Format::decode(bytes[j], i, factors[j], weights[j], largest[j].magnitudes);
      if constexpr (!kWhole) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) weights[j][pair] = multiply_pairs(weights[j][pair], factors[j].rest());
      }
    }
    if constexpr (kWhole) {
      multiply_eight(acc[0], weights, x[i]);
    } else {
      multiply_eight(acc[0], weights, read(0, i));
    }
#pragma unroll
    for (int tile = 1; tile < kTiles; ++tile) {
      if (tile >= rows.tiles) break;
      multiply_eight(acc[tile], weights, read(tile, i));
    }
  }
}

template <class Format, int kTiles, class Source>
DEVICE void add_products(float (&acc)[kTiles][4], const Depth& depth, Source& source, Rows rows,
                         Largest (&largest)[2]) {
  const int stretches = depth.stretches();
  for (int base = 0; base < stretches; base += Source::kDepth) {
#pragma unroll Source::kUnrolled
    for (int slot = 0; slot < Source::kDepth; ++slot) {
      const int stretch = base + slot;
      if (stretch >= stretches) break;
      const Stretch<Format>& now = source.take(slot);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const typename Format::Factors factors[] = {typename Format::Factors(now.scales[piece][0]),
                                                    typename Format::Factors(now.scales[piece][1])};
        largest[0].scale = max(largest[0].scale, factors[0].scale);
        largest[1].scale = max(largest[1].scale, factors[1].scale);
        constexpr int kSkipped = 64 / 16 * Format::kValues;
        const bool by_one = __ballot_sync(~0u, factors[0].needs_two() || factors[1].needs_two()) == 0;
        if (stretch < depth.whole && by_one) {
          add_piece<Format, kTiles, true>(acc, now.bytes[piece], factors, rows, piece * kSkipped, true, largest);
        } else {
          const bool exists = depth.exists(stretch, piece);
          add_piece<Format, kTiles, false>(acc, now.bytes[piece], factors, rows, piece * kSkipped, exists, largest);
        }
      }
      source.give_back(slot, stretch);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) rows.x[i] += kStep / 16 * Format::kValues;
    }
  }
}

// The sums of all warps, in their order: warp i writes row tile i. Sums with a weight that is NaN are NaN.
template <class Format, int kTiles>
DEVICE void write_sums(const PackedGemm& c, int group, const float (&acc)[kTiles][4], Largest (&largest)[2],
                       int64_t token, int rows, float4 (*partial)[kRowTiles][32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (rows + kRowsOfTile - 1) / kRowsOfTile;
  float poison[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned found = __ballot_sync(~0u, Format::has_nan(largest[i].magnitudes) || largest[i].scale == 0xFF);
    poison[i] = found >> lane / 4 * 4 & 15 ? __uint_as_float(0x7FC00000) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    if (i < tiles)
      partial[warp][i][lane] = {acc[i][0] + poison[0], acc[i][1] + poison[0], acc[i][2] + poison[1],
                                acc[i][3] + poison[1]};
  __syncthreads();
  if (warp < tiles) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float4 part = partial[i][warp][lane];
      sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
    }
    const int64_t column = blockIdx.x * int64_t{kColumns} + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = warp * kRowsOfTile + lane % 4 * 2 + j % 2, of = column + j / 2 * 8;
      if (row < rows && of < c.n) write_result(c, group, token + row, of, sums[j] * Format::kFactor);
    }
  }
  __syncthreads();
}

// The rows behind the last group, of the block's columns.
DEVICE void zero_rows(const PackedGemm& c, int64_t first) {
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x % kColumns;
  if (column >= c.n) return;
  for (int64_t token = first + threadIdx.x / kColumns; token < c.tokens; token += kWarps * 32 / kColumns)
    write_number(c.out, c.output, token * c.out_pitch + column, 0.f);
}

template <class Format, int kTiles, class Source>
DEVICE void multiply_rows(const PackedGemm& c, int group, const Depth& depth, Source& source, int64_t token, int count,
                          float4 (*partial)[kRowTiles][32]) {
  float acc[kTiles][4] = {};
  Largest largest[2];
  add_products<Format, kTiles>(acc, depth, source, Rows(c, token, count, Format::kValues), largest);
  write_sums<Format, kTiles>(c, group, acc, largest, token, count, partial);
}

template <class Format, class Source, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) packed_gemm_kernel(const __grid_constant__ PackedGemm c) {
  __shared__ float4 partial[kWarps][kRowTiles][32];
  const int group = blockIdx.y;
  if (group == c.sizes.groups) {
    const int64_t end = rows_before(c.sizes, group, c.tokens);
    if (c.zero_tail) zero_rows(c, end);
    return;
  }
  if (read_index(c.sizes.sizes, c.sizes.int64_sizes, group) <= 0) return;
  const Cursor<Format> cursor(c, group, blockIdx.x * int64_t{kColumns} + threadIdx.x % 32 / 4);
  const Depth depth = Depth::of(c, Format());
  Source source(cursor, depth);  // before it is known where the rows are
  const int64_t start = rows_before(c.sizes, group, c.tokens);
  const int64_t rows = clamped_size(c.sizes, group, c.tokens - start);
  constexpr int kRows = kRowTiles * kRowsOfTile;
#pragma unroll 1
  for (int64_t first = 0; first < rows; first += kRows) {
    if (first) source = Source(cursor, depth);
    const int count = static_cast<int>(min(rows - first, int64_t{kRows}));
    if (count <= kRowsOfTile) {
      multiply_rows<Format, 1>(c, group, depth, source, start + first, count, partial);
    } else {
      multiply_rows<Format, kRowTiles>(c, group, depth, source, start + first, count, partial);
    }
  }
}

template <class Format>
void launch(PackedGemm c, cudaStream_t stream) {
  FUSIBLE_CHECK(c.k % Format::kValues == 0, "rows of packed weights must be multiples of 16 bytes, got k ", c.k);
  c.sizes.wrong = wrong_size_word(current_device());
  using Source = InRegisters<Format, 2>;
  const dim3 grid(static_cast<unsigned>(blocks_of(c.n, kColumns)), static_cast<unsigned>(c.sizes.groups + 1));
  packed_gemm_kernel<Format, Source, 4><<<grid, kWarps * 32, Source::kSharedBytes, stream>>>(c);
}

}  // namespace

void packed_gemm(const PackedGemm& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.n) return;
  const DeviceGuard guard(device);
  switch (c.format) {
    case PackedFormat::kMXFP8: launch<PackedMXFP8>(c, stream); break;
    case PackedFormat::kNVFP4: launch<PackedNVFP4>(c, stream); break;
    case PackedFormat::kMXFP4: launch<PackedMXFP4>(c, stream); break;
  }
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "a product of ", c.tokens, " rows and packed weights of ", c.n, " x ", c.k);
}

}  // namespace fusible
