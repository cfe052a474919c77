// SPDX-License-Identifier: Apache-2.0
// Values of 8 or 4 bits with a scale for each 32 or 16 of them, as pairs of bf16: exactly. A thread decodes one piece
// at a time: 16 bytes of a row, with its scales.
#pragma once
#include "device/ptx/float8.cuh"
#include "device/ptx/warp_mma.cuh"

namespace fusible {

DEVICE uint32_t both(uint32_t half) { return half | half << 16; }

// Two products of bf16.
DEVICE uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  const __nv_bfloat162 product =
      __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(y));
  return reinterpret_cast<const uint32_t&>(product);
}

// `Factors` are the scale factors of a piece, which is decoded eight values at a time. Values are not checked in each
// piece: the largest magnitudes and scales of all pieces of a row decide at the end whether its sums are NaN.

// Values times 2^-kept become values times a power of two whose byte is `scale`, in one product of bf16 where
// 2^(scale - 127 + kept) is a bf16, else in two.
template <uint32_t kKept>
struct PowerOfTwo {
  static constexpr uint32_t kMostInOne = 254 - kKept;
  uint32_t pair, scale;

  DEVICE explicit PowerOfTwo(uint32_t byte) : pair(both((min(byte, kMostInOne) + kKept) << 7)), scale(byte) {}
  DEVICE bool needs_two() const { return scale > kMostInOne; }
  DEVICE uint32_t rest() const { return both((max(scale, kMostInOne) - kMostInOne + 127) << 7); }
};

// e4m3 with a power of two for each 32: MXFP8.
struct PackedMXFP8 {
  static constexpr int kValues = 16, kScaleValues = 32;
  using Scales = uint8_t;                // of a piece
  static constexpr float kFactor = 1.f;  // of the values that come out
  using Factors = PowerOfTwo<120>;

  // The exponent and mantissa bits of e4m3, read as bf16, are 2^-120 times the value, also for subnormal values.
  DEVICE static void decode(const uint4& bytes, int eighth, const Factors& factors, uint32_t (&pairs)[4],
                            uint32_t& largest) {
    const uint32_t words[] = {eighth ? bytes.z : bytes.x, eighth ? bytes.w : bytes.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = __byte_perm(words[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
      const uint32_t magnitudes = pair << 4 & 0x07F007F0;
      largest = ptx::max_u16x2(largest, magnitudes);
      pairs[i] = multiply_pairs(magnitudes | (pair << 8 & 0x80008000), factors.pair);
    }
  }
  DEVICE static bool has_nan(uint32_t largest) { return (largest + 0x00100010) & 0x08000800; }
};

// The codes of e2m1 in the low four bits of byte kByte of `even` and of `odd`, as a pair of bf16 that are 2^-126 of the
// values, also of subnormal ones.
template <int kByte>
DEVICE uint32_t e2m1_pair(uint32_t even, uint32_t odd) {
  const uint32_t codes = ptx::permute<kByte | (8 + kByte) << 4 | (4 + kByte) << 8 | (8 + kByte) << 12>(even, odd);
  return codes * 0x1040 & 0x81C081C0;  // one copy for the sign, one for the rest
}
DEVICE void decode_e2m1(const uint4& bytes, int eighth, uint32_t factor, uint32_t (&pairs)[4]) {
  const uint32_t word = eighth == 0 ? bytes.x : eighth == 1 ? bytes.y : eighth == 2 ? bytes.z : bytes.w;
  const uint32_t even = word & 0x0F0F0F0F, odd = word >> 4 & 0x0F0F0F0F;
  pairs[0] = multiply_pairs(e2m1_pair<0>(even, odd), factor),
  pairs[1] = multiply_pairs(e2m1_pair<1>(even, odd), factor);
  pairs[2] = multiply_pairs(e2m1_pair<2>(even, odd), factor),
  pairs[3] = multiply_pairs(e2m1_pair<3>(even, odd), factor);
}

// e2m1 with a power of two for each 32: MXFP4.
struct PackedMXFP4 {
  static constexpr int kValues = 32, kScaleValues = 32;
  using Scales = uint8_t;
  static constexpr float kFactor = 1.f;
  using Factors = PowerOfTwo<126>;

  DEVICE static void decode(const uint4& bytes, int eighth, const Factors& factors, uint32_t (&pairs)[4], uint32_t&) {
    decode_e2m1(bytes, eighth, factors.pair, pairs);
  }
  DEVICE static bool has_nan(uint32_t) { return false; }
};

// e2m1 with a scale in e4m3 for each 16: NVFP4. Values and scales stay 2^8 times too small, so that one product does.
struct PackedNVFP4 {
  static constexpr int kValues = 32, kScaleValues = 16;
  using Scales = uint16_t;  // of a piece: two
  static constexpr float kFactor = 256.f;
  struct Factors {
    uint32_t pairs[2];
    static constexpr uint32_t scale = 0;  // NaN values are NaN in the pairs too

    DEVICE explicit Factors(uint16_t scales) {
      const float2 two = ptx::unpack_e4m3(scales);
      const float first = two.x * 0x1p118f, second = two.y * 0x1p118f;
      pairs[0] = ptx::pack<__nv_bfloat16>(first, first), pairs[1] = ptx::pack<__nv_bfloat16>(second, second);
    }
    DEVICE bool needs_two() const { return false; }
    DEVICE uint32_t rest() const { return both(127 << 7); }
  };
  DEVICE static void decode(const uint4& bytes, int eighth, const Factors& factors, uint32_t (&pairs)[4], uint32_t&) {
    decode_e2m1(bytes, eighth, eighth < 2 ? factors.pairs[0] : factors.pairs[1], pairs);
  }
  DEVICE static bool has_nan(uint32_t) { return false; }
};

}  // namespace fusible
