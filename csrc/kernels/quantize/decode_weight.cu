// SPDX-License-Identifier: Apache-2.0
// A warp decodes a row of a weight. A lane takes eight neighbouring values at a time, which share a scale: it loads
// their 4 or 8 bytes of codes, and stores 16 bytes. So a warp reads 128 or 256 bytes in a piece and writes 512, and
// no sector is touched twice. Codes of four bits are looked up in 16 banks of shared memory, which never conflict.
// Every operation rounds like the definition's (ops/formats), whatever the flags of the compiler.
#include <algorithm>
#include <bit>

#include "device/ptx/element.cuh"
#include "device/ptx/float8.cuh"
#include "device/ptx/vector.cuh"
#include "device/quantize/quantize.cuh"
#include "fusible/decode_weight.h"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_config.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kRows = kThreads / 32, kValues = 8;
constexpr int kUnits = 4;  // of eight values, whose loads are in flight together
constexpr int kNestedBlock = 256, kMapSize = 256;
constexpr float kTables[3][16] = {
    {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
    {-1, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
     -0.18477343022823334f, -0.09105003625154495f, 0, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f,
     0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1},
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
};

struct Params {
  DecodeWeight call;
  int64_t rows;  // of all groups
  int64_t scales_of_row;
  int64_t scale_rows;  // rows of scales of a group
  int64_t section;     // rows of a section
  int scale_shift;     // log2 of the units that share a scale
  float table[16];
};

// The row of a warp. Divisions are of 32 bits: those of 64 would cost as much as decoding a short row.
struct DecodedRow {
  uint32_t group, row;
  int64_t scales;  // the number of the first one

  DEVICE DecodedRow(const Params& p, uint32_t index)
      : group(index / static_cast<uint32_t>(p.call.n)), row(index % static_cast<uint32_t>(p.call.n)) {
    scales = (group * p.scale_rows + row / static_cast<uint32_t>(p.call.rows_of_scale)) * p.scales_of_row;
  }
};

// The scales of a row, of which a unit has one.
template <StoredScale kStored>
struct Scales {
  const Params& p;
  const DecodedRow& at;
  const float* decoders = nullptr;  // of the group
  float factor = 1;

  DEVICE Scales(const Params& params, const DecodedRow& row) : p(params), at(row) {
    if constexpr (kStored == StoredScale::kE4M3 || kStored == StoredScale::kNested)
      decoders = static_cast<const float*>(p.call.decoders) + at.group * p.call.decoders_of_group;
    if (kStored == StoredScale::kE4M3 && p.call.decoders) factor = decoders[at.row / static_cast<uint32_t>(p.section)];
  }
  DEVICE float operator()(int64_t block) const {
    const int64_t i = at.scales + block;
    const auto* bytes = static_cast<const uint8_t*>(p.call.scales);
    if constexpr (kStored == StoredScale::kFloat32) return static_cast<const float*>(p.call.scales)[i];
    else if constexpr (kStored == StoredScale::kFloat16)
      return __half2float(static_cast<const __half*>(p.call.scales)[i]);
    else if constexpr (kStored == StoredScale::kBFloat16)
      return __bfloat162float(static_cast<const __nv_bfloat16*>(p.call.scales)[i]);
    else if constexpr (kStored == StoredScale::kE4M3) {
      const float scale = ptx::unpack_e4m3(bytes[i]).x;
      return p.call.divides ? __fdiv_rn(scale, factor) : __fmul_rn(scale, factor);
    } else if constexpr (kStored == StoredScale::kE8M0) {
      return from_e8m0(bytes[i]);
    } else {
      const float* const map = decoders + p.call.decoders_of_group - kMapSize - 1;
      const int64_t nested = (i - at.group * p.scale_rows * p.scales_of_row) / kNestedBlock;
      return __fmul_rn(map[bytes[i]], decoders[nested]) + map[kMapSize];
    }
  }
  // The integer that is the zero of a block.
  DEVICE float zero(int64_t block) const {
    const int64_t words = (p.call.n + 7) / 8, word = (at.group * words + at.row / 8) * p.scales_of_row + block;
    return static_cast<float>(
        static_cast<int>(static_cast<const uint32_t*>(p.call.decoders)[word] >> 4 * (at.row % 8) & 15) - 8);
  }
};

// The codes of eight values: a word of four bits each.
struct Nibbles {
  using Words = uint32_t;
  static constexpr int kBytes = 4;

  // Swaps the codes of each byte, so that the first code is in the high bits, as in the other formats.
  DEVICE static Words swapped(Words codes) { return (codes & 0x0F0F0F0F) << 4 | (codes >> 4 & 0x0F0F0F0F); }
  DEVICE static void values(float (&to)[kValues], Words codes, const float* table) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) to[i] = table[codes >> 4 * i & 15];
  }
};
// Two words of bytes.
struct Bytes {
  using Words = uint2;
  static constexpr int kBytes = 8;

  DEVICE static Words swapped(Words codes) { return codes; }
  DEVICE static void values(float (&to)[kValues], const Words& codes, const float*) {
    const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const float2 pair = ptx::unpack_e4m3(words[i / 4] >> 8 * (i % 4) & 0xFFFF);
      to[i] = pair.x, to[i + 1] = pair.y;
    }
  }
};

template <class CodesOf, StoredScale kStored, class T>
__global__ void __launch_bounds__(kThreads) decode_weight_kernel(const Params p) {
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = p.table[threadIdx.x];
  __syncthreads();
  const uint32_t index = blockIdx.x * kRows + threadIdx.x / 32;
  if (index >= p.rows) return;
  using Words = typename CodesOf::Words;
  const DecodedRow at(p, index);
  const Scales<kStored> scales(p, at);
  const bool has_zeros = p.call.codes == Codes::kInteger && p.call.decoders, high_first = p.call.codes == Codes::kNF4;
  const int units = static_cast<int>(p.call.k / kValues), lane = threadIdx.x % 32;
  const auto* from = reinterpret_cast<const Words*>(p.call.data + int64_t{index} * units * CodesOf::kBytes);
  auto* to = static_cast<T*>(p.call.out) + index * p.call.k;
  for (int first = lane; first < units; first += 32 * kUnits) {
    Words codes[kUnits];
    float scale[kUnits], zero[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = min(first + 32 * i, units - 1);
      codes[i] = from[unit], scale[i] = scales(unit >> p.scale_shift);
      zero[i] = has_zeros ? scales.zero(unit >> p.scale_shift) : 0;
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float values[kValues];
      CodesOf::values(values, high_first ? CodesOf::swapped(codes[i]) : codes[i], table);
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j] = __fmul_rn(has_zeros ? values[j] - zero[i] : values[j], scale[i]);
      const int unit = first + 32 * i;
      ptx::store_vector_if(unit < units, to + int64_t{kValues} * unit, rounded_words<T>(values));
    }
  }
}

Params params_of(const DecodeWeight& c) {
  Params p{c, c.groups * c.n, blocks_of(c.k, c.columns_of_scale), blocks_of(c.n, c.rows_of_scale), c.n, 31, {}};
  if (c.columns_of_scale < c.k) p.scale_shift = std::countr_zero(static_cast<uint64_t>(c.columns_of_scale / kValues));
  if (c.stored_scale == StoredScale::kE4M3 && c.decoders) p.section = c.n / c.decoders_of_group;
  if (c.codes != Codes::kE4M3) std::ranges::copy(kTables[static_cast<int>(c.codes)], p.table);
  return p;
}

template <class CodesOf, StoredScale kStored>
void launch(const Params& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(p.rows, kRows));
  dispatch_dtype_of_16_bits(p.call.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    decode_weight_kernel<CodesOf, kStored, T><<<blocks, kThreads, 0, stream>>>(p);
  });
}

}  // namespace

void decode_weight(const DecodeWeight& c, int device, cudaStream_t stream) {
  if (!c.groups || !c.n || !c.k) return;
  const DeviceGuard guard(device);
  const Params p = params_of(c);
  using enum StoredScale;
  if (c.codes == Codes::kE4M3)
    dispatch<kFloat32, kFloat16, kBFloat16, kE8M0>(c.stored_scale,
                                                   [&](auto scale) { launch<Bytes, scale>(p, stream); });
  else
    dispatch<kFloat32, kFloat16, kBFloat16, kE4M3, kE8M0, kNested>(
        c.stored_scale, [&](auto scale) { launch<Nibbles, scale>(p, stream); });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "decoding ", c.groups, " matrices of ", c.n, " x ", c.k);
}

}  // namespace fusible
