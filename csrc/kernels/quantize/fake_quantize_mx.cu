// SPDX-License-Identifier: Apache-2.0
// MXFP8 and back: a warp takes 32 rows of one group and 32 features, of which lane l has 8 features of the rows l / 4,
// l / 4 + 8, ... Blocks of both copies are such a tile's rows and columns, so nothing goes through shared memory.
#include <cuda_runtime.h>

#include "device/ptx/element.cuh"
#include "device/quantize/fake_quantize.cuh"
#include "fusible/error.h"

namespace fusible {
namespace {

using Rows = uint16_t;  // bf16

// A power of two by the byte of its exponent.
DEVICE float power_of(uint32_t byte) {
  const uint32_t bits = byte == 0 ? 0x00400000u : byte == 0xFF ? 0x7FC00000u : byte << 23;
  return __uint_as_float(bits);
}

// The encoding of a block whose largest magnitude is `amax`: see cast_e8m0 in ops/formats/formats.py.
DEVICE Encoding mx_encoding(float amax) {
  const uint32_t bits = __float_as_uint(__fmul_rn(amax, static_cast<float>(1.0 / 448.0)));
  const uint32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
  const bool up = mantissa && exponent < 0xFE && (exponent || mantissa > 0x400000u);
  const uint32_t byte = bits == 0x7F800000u ? 0xFE : min(exponent, 0xFFu) + up;
  return {byte == 0xFF ? __uint_as_float(0x7FC00000u) : power_of(0xFE - byte), power_of(byte)};
}

// Two values, rounded to e4m3 times their scales and then to bf16.
DEVICE uint32_t mx_pair(float2 v, const Encoding& low, const Encoding& high) {
  const float2 rounded = ptx::unpack_e4m3(ptx::pack_e4m3(__fmul_rn(v.x, low.encode), __fmul_rn(v.y, high.encode)));
  return ptx::pack<__nv_bfloat16>(__fmul_rn(rounded.x, low.decode), __fmul_rn(rounded.y, high.decode));
}

template <class T>
using MXTile = Tile<T, 4>;
template <class T>
using MXRows = LaneRows<T, 8>;

template <class T>
DEVICE void store_rows(const MXTile<T>& tile, const MXRows<T>& rows, int64_t feature, bool exists, Rows* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = largest_of_lanes<T>(largest_word(tile, i), 1, 2);
    const Encoding e = mx_encoding(Tile<T>::largest(word));
    rows.store(out, i, feature, exists,
               {mx_pair(tile.pair(i, 0), e, e), mx_pair(tile.pair(i, 1), e, e), mx_pair(tile.pair(i, 2), e, e),
                mx_pair(tile.pair(i, 3), e, e)});
  }
}

template <class T>
DEVICE void store_columns(const MXTile<T>& tile, const MXRows<T>& rows, int64_t feature, bool exists, Rows* out) {
  constexpr int kWords = Tile<T>::kWords, kPerWord = 8 / kWords;
  Encoding encodings[8];
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    uint32_t most = tile.magnitudes(0, j);
#pragma unroll
    for (int i = 1; i < 4; ++i) most = Tile<T>::larger(most, tile.magnitudes(i, j));
    most = largest_of_lanes<T>(most, 4, 16);
#pragma unroll
    for (int f = 0; f < kPerWord; ++f)
      encodings[kPerWord * j + f] = mx_encoding(Tile<T>::largest(Tile<T>::of_feature(most, f)));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = mx_pair(tile.pair(i, j), encodings[2 * j], encodings[2 * j + 1]);
    rows.store(out, i, feature, exists, {values[0], values[1], values[2], values[3]});
  }
}

// All units of a block of threads.
template <class T>
DEVICE void fake_quantize(const MXRows<T>& rows, const FeatureUnits& units, int64_t features, void* by_row,
                          void* by_column) {
  each_unit(units, kMXBlock, features, [&](int64_t first) INLINE {
    const int64_t feature = first + threadIdx.x % 4 * 8;
    const bool exists = feature < features;
    MXTile<T> tile;
    rows.load(tile, feature, exists);
    if (by_row) store_rows(tile, rows, feature, exists, static_cast<Rows*>(by_row));
    if (by_column) store_columns(tile, rows, feature, exists, static_cast<Rows*>(by_column));
  });
}

template <class T>
__global__ void __launch_bounds__(kFakeThreads)
    mx_rows_kernel(const __grid_constant__ FakeQuantizeRows c, const FeatureUnits units) {
  const TokenBlock block = find_token_block<kMXBlock>(c.sizes, static_cast<int>(c.tokens), blockIdx.x / units.chunks);
  if (!block.rows) return;
  const MXRows<T> rows(threadIdx.x % 32 / 4, block.rows, block.first_row, c.features, [&](int row) INLINE {
    const int64_t r = block.first_row + row;
    return static_cast<const T*>(c.x) + (c.slot_of_row ? __ldg(&c.slot_of_row[r]) / c.top_k : r) * c.pitch;
  });
  fake_quantize(rows, units, c.features, c.rows, c.columns);
}

template <class T, int kCapacity>
__global__ void __launch_bounds__(kFakeThreads)
    mx_weight_kernel(const __grid_constant__ FakeQuantizeWeight c, const __grid_constant__ MatrixTable<kCapacity> table,
                     const FeatureUnits units) {
  const MatrixRows block(c, units.chunks, kMXBlock);
  const T* matrix = table.template matrix<T>(c, block.group);
  const MXRows<T> rows(threadIdx.x % 32 / 4, block.rows, block.group * c.n + block.first, c.k,
                       [&](int row) INLINE { return matrix + (block.first + row) * c.pitch; });
  fake_quantize(rows, units, c.k, c.rows, c.columns);
}

template <class T, int kCapacity>
void launch(const FakeQuantizeWeight& c, cudaStream_t stream) {
  const FeatureUnits units(c.k, kMXBlock);
  const MatrixTable<kCapacity> table(c.addresses);
  const unsigned grid = static_cast<unsigned>(c.groups * blocks_of(c.n, kMXBlock) * units.chunks);
  mx_weight_kernel<T, kCapacity><<<grid, kFakeThreads, 0, stream>>>(c, table, units);
}

}  // namespace

void fake_quantize_mx_rows(const FakeQuantizeRows& c, cudaStream_t stream) {
  const FeatureUnits units(c.features, kMXBlock);
  const unsigned grid = static_cast<unsigned>((c.tokens / kMXBlock + c.sizes.groups) * units.chunks);
  dispatch_dtype_of_16_bits(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    mx_rows_kernel<T><<<grid, kFakeThreads, 0, stream>>>(c, units);
  });
}

void fake_quantize_mx_weight(const FakeQuantizeWeight& c, cudaStream_t stream) {
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    c.addresses.size() <= 64 ? launch<T, 64>(c, stream) : launch<T, kMaxGroups>(c, stream);
  });
}

}  // namespace fusible
