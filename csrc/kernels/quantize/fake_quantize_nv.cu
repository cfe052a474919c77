// SPDX-License-Identifier: Apache-2.0
// NVFP4 and back: a kernel finds the largest magnitudes of groups, another rounds. For tokens, a warp takes 16 rows of
// one group and 64 features, of which each lane has two neighbours in all rows: a column's block is one lane's, whose
// transform is sums of registers. For weights, lane l has 8 features of the rows l / 8, l / 8 + 4, ...
#include <cuda_runtime.h>

#include <cfloat>

#include "device/ptx/element.cuh"
#include "device/ptx/philox.cuh"
#include "device/quantize/fake_quantize.cuh"
#include "fusible/error.h"

namespace fusible {
namespace {

constexpr int kUnit = 64;  // features of a warp
using Words = uint32_t[kNVBlock];

DEVICE float at_most_largest(float x) { return x > FLT_MAX ? FLT_MAX : x; }  // NaN stays

// How the blocks of a group are scaled; each line is one operation of the definition in ops/formats/nvfp4.py.
struct NVGroup {
  float multiplier, inverse;

  DEVICE explicit NVGroup(float amax) {
    const float encode = amax == 0.f || amax == INFINITY ? 1.f : at_most_largest(__fdiv_rn(2688.f, amax));
    multiplier = __fmul_rn(encode, 1.f / 6.f);
    inverse = __fdiv_rn(1.f, encode);
  }
  DEVICE Encoding encoding(float amax) const {
    const float scale = at_most_largest(__fmul_rn(amax, multiplier));
    const float decode = ptx::unpack_e4m3(ptx::pack_e4m3(scale, 0.f)).x;
    return {at_most_largest(__fdiv_rn(1.f, __fmul_rn(decode, inverse))), decode};
  }
};

// Rounds to the nearest value of e2m1, ties to the even code. Adding and subtracting a power of two rounds to the last
// bit of
// the sum: to 1/2 below 2, to 1 below 4, to 2 above.
DEVICE float nearest_e2m1(float x) {
  const float magnitude = fminf(fabsf(x), 6.f);  // also of NaN
  const float large = magnitude < 2.f ? 0x1p22f : magnitude < 4.f ? 0x1p23f : 0x1p24f;
  return copysignf(magnitude + large - large, x);
}
// Rounds to a neighbouring value: to the upper one if `random`, below 2^16, is less than 2^16 times the distance from
// the lower one.
DEVICE float random_e2m1(float x, uint32_t random) {
  const float magnitude = fminf(fabsf(x), 6.f);
  const float per_step = magnitude < 2.f ? 2.f : magnitude < 4.f ? 1.f : 0.5f;
  const float steps = magnitude * per_step, below = floorf(steps);
  const bool up = static_cast<float>(random) < (steps - below) * 0x1p16f;
  return copysignf((below + up) * (1.f / per_step), x);
}

// Random numbers of 8 rows of a feature.
struct RandomRows {
  uint4 words{};

  DEVICE uint32_t of_row(int row) const {
    const uint32_t all[] = {words.x, words.y, words.z, words.w};
    return row % 2 ? all[row / 2] >> 16 : all[row / 2] & 0xFFFFu;
  }
};

DEVICE uint32_t magnitudes(uint32_t word) { return word & 0x7FFF7FFFu; }  // of two values
// The larger of two neighbours, in the low half.
DEVICE uint32_t larger_half(uint32_t word) { return ptx::max_u16x2(word, word >> 16) & 0xFFFFu; }

// Vectors of 16 rows times hadamard() of ops/formats/nvfp4.py: sums in double, rounded to fp32 and to T.
template <class T>
DEVICE void transform(Words& words) {
  constexpr uint32_t kNegative = 0b1101'0111'1110'1000;
  uint32_t low[kNVBlock];
#pragma unroll
  for (int feature = 0; feature < 2; ++feature) {
    double v[kNVBlock];
#pragma unroll
    for (int i = 0; i < kNVBlock; ++i) {
      const float2 pair = ptx::unpack<T>(words[i]);
      const float x = feature ? pair.y : pair.x;
      v[i] = kNegative >> i & 1 ? -x : x;
    }
#pragma unroll
    for (int step = 1; step < kNVBlock; step *= 2)
#pragma unroll
      for (int i = 0; i < kNVBlock; ++i)
        if (!(i & step)) {
          const double sum = v[i] + v[i + step], difference = v[i] - v[i + step];
          v[i] = sum, v[i + step] = difference;
        }
#pragma unroll
    for (int i = 0; i < kNVBlock; ++i) {
      const float x = static_cast<float>(v[i] * 0.25 + 0.);  // a sum of zeros is never -0
      if (feature) words[i] = low[i] | ptx::pack<T>(0.f, x) & 0xFFFF0000u;
      else low[i] = ptx::pack<T>(x, 0.f) & 0xFFFFu;
    }
  }
}

// The encodings of a lane's two features.
struct EncodingPair {
  Encoding low, high;
};

// The destination of the quantised values of a block, and their number.
struct NVCopy {
  uint32_t number;  // position in the tensor: each has its own random numbers
  void* out;
  int64_t first_row;
  int rows;
};

// A warp's view of a block of 16 tokens.
template <class T>
struct NVTokens {
  TokenBlock block;
  int lane, row;  // `row`: of x, for lane % 16; -1 if there is none

  DEVICE NVTokens(const FakeQuantizeRows& c, int chunks)
      : block(find_token_block<kNVBlock>(c.sizes, static_cast<int>(c.tokens), blockIdx.x / chunks)),
        lane(threadIdx.x % 32),
        row(-1) {
    if (const int i = lane % kNVBlock; i < block.rows) {
      row = static_cast<int>(block.first_row) + i;
      if (c.slot_of_row) row = __ldg(&c.slot_of_row[row]) / c.top_k;
    }
  }
  DEVICE void load(Words& words, const FakeQuantizeRows& c, int64_t feature, bool exists) const {
#pragma unroll
    for (int i = 0; i < kNVBlock; ++i) {
      const int64_t r = __shfl_sync(~0u, row, i);
      const T* from = static_cast<const T*>(c.x) + r * c.pitch + feature;
      words[i] = exists && r >= 0 ? __ldg(reinterpret_cast<const uint32_t*>(from)) : 0;
    }
  }
  // Rounds the lane's values, in row i by encoding(i), and stores them.
  template <bool kRandom, class EncodingOf>
  DEVICE void store(const Words& words, const FakeQuantizeRows& c, int64_t feature, bool exists, const NVCopy& to,
                    EncodingOf encoding) const {
    uint16_t* out = static_cast<uint16_t*>(to.out) + to.first_row * c.features + feature;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RandomRows low, high;
      if constexpr (kRandom)
        low = numbers(c, feature, half, to.number), high = numbers(c, feature + 1, half, to.number);
#pragma unroll
      for (int i = 8 * half; i < 8 * half + 8; ++i) {
        const EncodingPair e = encoding(i);
        float2 v = ptx::unpack<T>(words[i]);
        v = {__fmul_rn(v.x, e.low.encode), __fmul_rn(v.y, e.high.encode)};
        if constexpr (kRandom) v = {random_e2m1(v.x, low.of_row(i % 8)), random_e2m1(v.y, high.of_row(i % 8))};
        else v = {nearest_e2m1(v.x), nearest_e2m1(v.y)};
        const uint32_t pair = ptx::pack<__nv_bfloat16>(__fmul_rn(v.x, e.low.decode), __fmul_rn(v.y, e.high.decode));
        if (exists && i < to.rows) *reinterpret_cast<uint32_t*>(out + i * c.features) = pair;
      }
    }
  }

 private:
  // Random numbers of a feature in the first or the second 8 rows of the block.
  DEVICE RandomRows numbers(const FakeQuantizeRows& c, int64_t feature, int half, uint32_t copy) const {
    const auto seed = static_cast<uint64_t>(__ldg(reinterpret_cast<const long long*>(c.seed)));
    const uint32_t octet = 2 * block.in_group + half;
    return {philox({octet, static_cast<uint32_t>(feature), static_cast<uint32_t>(block.group), copy}, PhiloxKey(seed))};
  }
};

// Blocks of 16 features belong to 8 lanes; lane l computes the encodings of the rows 2 l and 2 l + 1.
template <class T, bool kRandom>
DEVICE void store_rows(const Words& words, const NVTokens<T>& at, const FakeQuantizeRows& c, const NVGroup& group,
                       int64_t feature, bool exists) {
  uint32_t most[kNVBlock / 2];  // of two rows each
#pragma unroll
  for (int i = 0; i < kNVBlock / 2; ++i)
    most[i] = larger_half(magnitudes(words[2 * i])) | larger_half(magnitudes(words[2 * i + 1])) << 16;
#pragma unroll
  for (int count = 4; count; count /= 2) {
    const bool upper = at.lane & count;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const uint32_t mine = upper ? most[i + count] : most[i], other = upper ? most[i] : most[i + count];
      most[i] = ptx::max_u16x2(mine, __shfl_xor_sync(~0u, other, count));
    }
  }
  const float2 amax = ptx::unpack<T>(most[0]);
  const Encoding mine[] = {group.encoding(amax.x), group.encoding(amax.y)};
  at.template store<kRandom>(words, c, feature, exists, {0, c.rows, at.block.first_row, at.block.rows},
                             [&](int row) INLINE -> EncodingPair {
                               const int owner = (at.lane & ~7) | row / 2;
                               const Encoding of_row{__shfl_sync(~0u, mine[row % 2].encode, owner),
                                                     __shfl_sync(~0u, mine[row % 2].decode, owner)};
                               return {of_row, of_row};
                             });
}

// The largest magnitudes of a lane's two features.
DEVICE uint32_t largest_of_features(const Words& words) {
  uint32_t most = magnitudes(words[0]);
#pragma unroll
  for (int i = 1; i < kNVBlock; ++i) most = ptx::max_u16x2(most, magnitudes(words[i]));
  return most;
}

template <class T, bool kRandom>
DEVICE void store_columns(const Words& words, const NVTokens<T>& at, const FakeQuantizeRows& c, const NVGroup& group,
                          int64_t feature, bool exists) {
  const float2 amax = ptx::unpack<T>(largest_of_features(words));
  const EncodingPair encodings{group.encoding(amax.x), group.encoding(amax.y)};
  at.template store<kRandom>(words, c, feature, exists, {1, c.columns, at.block.number * kNVBlock, kNVBlock},
                             [&](int) INLINE { return encodings; });
}

DEVICE float amax_of(const float* amax, int group) { return amax ? __ldg(amax + group) : 0.f; }

// One reader for both kernels: body(words, feature, whether it exists) of each unit.
template <class T, class Body>
DEVICE void each_unit_of_tokens(const NVTokens<T>& at, const FakeQuantizeRows& c, const FeatureUnits& units,
                                Body body) {
  each_unit(units, kUnit, c.features, [&](int64_t first) INLINE {
    const int64_t feature = first + 2 * at.lane;
    const bool exists = feature < c.features;
    Words words;
    at.load(words, c, feature, exists);
    body(words, feature, exists);
  });
}

template <class T>
__global__ void __launch_bounds__(kFakeThreads)
    nv_amax_of_rows_kernel(const __grid_constant__ FakeQuantizeRows c, const FeatureUnits units) {
  const NVTokens<T> at(c, units.chunks);
  if (!at.block.rows) return;
  uint32_t of_rows = 0, of_columns = 0;
  each_unit_of_tokens(at, c, units, [&](Words& words, int64_t, bool) INLINE {
    of_rows = ptx::max_u16x2(of_rows, largest_of_features(words));
    if (!c.columns) return;
    if (c.is_transformed) transform<T>(words);
    of_columns = ptx::max_u16x2(of_columns, largest_of_features(words));
  });
  const uint32_t row_word = largest_of_lanes<T>(of_rows, 1, 16), column_word = largest_of_lanes<T>(of_columns, 1, 16);
  if (at.lane) return;
  if (c.rows) raise(reinterpret_cast<uint32_t*>(c.row_amax + at.block.group), Tile<T>::largest(row_word));
  if (c.columns) raise(reinterpret_cast<uint32_t*>(c.column_amax + at.block.group), Tile<T>::largest(column_word));
}

template <class T, bool kRandom>
__global__ void __launch_bounds__(kFakeThreads)
    nv_rows_kernel(const __grid_constant__ FakeQuantizeRows c, const FeatureUnits units) {
  const NVTokens<T> at(c, units.chunks);
  if (!at.block.rows) return;
  const NVGroup by_row(amax_of(c.row_amax, at.block.group)), by_column(amax_of(c.column_amax, at.block.group));
  each_unit_of_tokens(at, c, units, [&](Words& words, int64_t feature, bool exists) INLINE {
    if (c.rows) store_rows<T, kRandom>(words, at, c, by_row, feature, exists);
    if (!c.columns) return;
    if (c.is_transformed) transform<T>(words);
    store_columns<T, kRandom>(words, at, c, by_column, feature, exists);
  });
}

template <class T>
void launch(const FakeQuantizeRows& c, cudaStream_t stream) {
  const FeatureUnits units(c.features, kUnit);
  const unsigned grid = static_cast<unsigned>(nv_blocks(c.tokens, c.sizes.groups) * units.chunks);
  for (float* amax : {c.row_amax, c.column_amax})
    if (amax)
      FUSIBLE_CUDA_CHECK(cudaMemsetAsync(amax, 0, c.sizes.groups * sizeof(float), stream), "zeroing ", c.sizes.groups,
                         " magnitudes");
  nv_amax_of_rows_kernel<T><<<grid, kFakeThreads, 0, stream>>>(c, units);
  if (c.seed) nv_rows_kernel<T, true><<<grid, kFakeThreads, 0, stream>>>(c, units);
  else nv_rows_kernel<T, false><<<grid, kFakeThreads, 0, stream>>>(c, units);
}

template <class T>
using NVTile = Tile<T, 4>;
template <class T>
using NVRows = LaneRows<T, 4>;

// body(tile, feature, whether it exists) of each unit of a block's matrix rows.
template <class T, class Body>
DEVICE void each_unit_of_weight(const NVRows<T>& rows, const FakeQuantizeWeight& c, const FeatureUnits& units,
                                Body body) {
  each_unit(units, kUnit, c.k, [&](int64_t first) INLINE {
    const int64_t feature = first + threadIdx.x % 8 * 8;
    NVTile<T> tile;
    rows.load(tile, feature, feature < c.k);
    body(tile, feature, feature < c.k);
  });
}
template <class T, int kCapacity>
DEVICE NVRows<T> rows_of_lane(const FakeQuantizeWeight& c, const MatrixTable<kCapacity>& table,
                              const MatrixRows& block) {
  const T* matrix = table.template matrix<T>(c, block.group);
  return {static_cast<int>(threadIdx.x % 32 / 8), block.rows, block.group * c.n + block.first, c.k,
          [&](int row) INLINE { return matrix + (block.first + row) * c.pitch; }};
}

template <class T, int kCapacity>
__global__ void __launch_bounds__(kFakeThreads)
    nv_amax_of_weight_kernel(const __grid_constant__ FakeQuantizeWeight c,
                             const __grid_constant__ MatrixTable<kCapacity> table, const FeatureUnits units) {
  const MatrixRows block(c, units.chunks, kNVBlock);
  uint32_t most = 0;
  each_unit_of_weight(rows_of_lane<T>(c, table, block), c, units, [&](const NVTile<T>& tile, int64_t, bool) INLINE {
    most = Tile<T>::larger(most, largest_word(tile));
  });
  most = largest_of_lanes<T>(most, 1, 16);
  if (threadIdx.x % 32 == 0) raise(reinterpret_cast<uint32_t*>(c.amax + block.group), Tile<T>::largest(most));
}

template <class T, int kCapacity>
__global__ void __launch_bounds__(kFakeThreads, sizeof(T) == 2 ? 8 : 5)  // a called division keeps no registers
    nv_weight_kernel(const __grid_constant__ FakeQuantizeWeight c, const __grid_constant__ MatrixTable<kCapacity> table,
                     const FeatureUnits units) {
  const MatrixRows block(c, units.chunks, kNVBlock);
  const NVRows<T> rows = rows_of_lane<T>(c, table, block);
  const NVGroup group(__ldg(c.amax + block.group));
  each_unit_of_weight(rows, c, units, [&](const NVTile<T>& tile, int64_t feature, bool exists) INLINE {
    uint32_t word = largest_of_lanes<T>(largest_word(tile), 1, 1);  // of 16 x 16
    word = largest_of_lanes<T>(word, 8, 16);
    const Encoding e = group.encoding(Tile<T>::largest(word));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 v = tile.pair(i, j);
        values[j] = ptx::pack<__nv_bfloat16>(__fmul_rn(nearest_e2m1(__fmul_rn(v.x, e.encode)), e.decode),
                                             __fmul_rn(nearest_e2m1(__fmul_rn(v.y, e.encode)), e.decode));
      }
      rows.store(static_cast<uint16_t*>(c.rows), i, feature, exists, {values[0], values[1], values[2], values[3]});
    }
  });
}

template <class T, int kCapacity>
void launch(const FakeQuantizeWeight& c, cudaStream_t stream) {
  const FeatureUnits units(c.k, kUnit);
  const MatrixTable<kCapacity> table(c.addresses);
  const unsigned grid = static_cast<unsigned>(c.groups * blocks_of(c.n, kNVBlock) * units.chunks);
  FUSIBLE_CUDA_CHECK(cudaMemsetAsync(c.amax, 0, c.groups * sizeof(float), stream), "zeroing ", c.groups, " magnitudes");
  nv_amax_of_weight_kernel<T, kCapacity><<<grid, kFakeThreads, 0, stream>>>(c, table, units);
  nv_weight_kernel<T, kCapacity><<<grid, kFakeThreads, 0, stream>>>(c, table, units);
}

}  // namespace

void fake_quantize_nv_rows(const FakeQuantizeRows& c, cudaStream_t stream) {
  dispatch_dtype_of_16_bits(c.type, [&](auto type) { launch<Element<decltype(type)::value>>(c, stream); });
}

void fake_quantize_nv_weight(const FakeQuantizeWeight& c, cudaStream_t stream) {
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    c.addresses.size() <= 64 ? launch<T, 64>(c, stream) : launch<T, kMaxGroups>(c, stream);
  });
}

}  // namespace fusible
