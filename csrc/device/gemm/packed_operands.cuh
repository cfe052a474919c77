// SPDX-License-Identifier: Apache-2.0
// Weights of 4 bits as the left operand of a product: bytes in shared memory, which a lane reads, decodes to bf16 and
// keeps in registers. A stage has 4 KB of them, and a word of factors for each 32 values (packed_groups.cuh).
//
// A scale is a product of two powers of two that bf16 has, so that any scale is exact: the first also raises codes to
// values (PowerOfTwo), the second is one but for large scales. A scale that is NaN has a second factor that is.
#pragma once
#include "device/epilogue/epilogue.cuh"
#include "device/gemm/operands.cuh"
#include "device/gemm/packed.cuh"

namespace fusible {

struct TwoFactors {
  uint32_t first, second;  // pairs of bf16
};
DEVICE TwoFactors factors_of(uint32_t scale) {
  const PackedMXFP4::Factors factors(scale);
  return {factors.pair, scale == 0xFF ? both(0x7FFF) : factors.rest()};
}
DEVICE uint32_t scaled(uint32_t codes, uint32_t first, uint32_t second) {
  return multiply_pairs(multiply_pairs(codes, first), second);
}

// A pair of values of the second pair's weights, if it exists.
DEVICE uint32_t read_pair(const PackedWeights& p, int64_t at, bool exists) {
  return exists ? __ldg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(p.second) + at)) : 0;
}

// B [N, K / 2] of each group, in halves: rows of 32 bytes, swizzled. A row of the product is one of the weights.
struct PackedRows : KMajor<__nv_bfloat16> {
  static constexpr bool kHalves = false, kPacked = true;
  static constexpr int kRowBytes = 32, kPieces = 2, kRows = 64;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kRows * kRowBytes, k / 2, tile.column * (kPieces * kRows) + i * kRows, tile.coordinate.near,
          tile.coordinate.far);
  }

  // The factors of a row's two blocks in a stage: the first in the low half of a word, the second in the high one.
  template <class K>
  struct Scales {
    uint16_t rows[4];
    DEVICE void fetch(const PackedWeights& p, const WorkTile& tile, int block, int lane) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = min(tile.column * K::kTileN + lane + 32 * i, p.rows - 1);
        rows[i] = __ldg(
            reinterpret_cast<const uint16_t*>(p.scales + (int64_t{tile.group} * p.rows + row) * p.blocks + block * 2));
      }
    }
    DEVICE void put(uint32_t* to, int lane) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const TwoFactors even = factors_of(rows[i] & 0xFF), odd = factors_of(rows[i] >> 8);
        reinterpret_cast<uint2*>(to)[lane + 32 * i] = {ptx::permute<0x5410>(even.first, even.second),
                                                       ptx::permute<0x5410>(odd.first, odd.second)};
      }
    }
  };

  // A lane's place in a stage, and what it has read there for a step of a product.
  class Lane {
   public:
    DEVICE Lane(int consumer, int warp, int lane)
        : row_(consumer * 64 + warp * 16 + lane / 4), column_(lane % 4), swap_(lane >> 4) {}
    template <int kStep>
    DEVICE void read(const uint8_t* bytes, const uint32_t* factors) {
      const uint8_t* from = bytes + row_ * kRowBytes + (kStep / 2 ^ swap_) * 16 + kStep % 2 * 8 + column_;
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        bytes_[lower] = from[lower * 8 * kRowBytes], bytes_[2 + lower] = from[lower * 8 * kRowBytes + 4];
        if (kStep % 2 == 0) factors_[lower] = factors[(row_ + lower * 8) * 2 + kStep / 2];
      }
    }
    template <int kStep>
    DEVICE void decode(uint32_t (&a)[4]) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t spread = bytes_[i] * 0x40040;  // magnitudes from bits 6 and 22 on, signs at 9 and 25
        const uint32_t factors = factors_[i % 2];
        a[i] = scaled(spread & 0x01C001C0, ptx::permute<0x1010>(factors, 0) ^ (spread << 6 & 0x80008000),
                      ptx::permute<0x3232>(factors, 0));
      }
    }
    // The same of the second pair, from device memory.
    DEVICE void read_second(const PackedWeights& p, const WorkTile& tile, int step, uint32_t (&a)[4]) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile.column * (kPieces * kRows) + row_ + i % 2 * 8, k = step * 16 + column_ * 2 + i / 2 * 8;
        a[i] = read_pair(p, tile.group * p.second_group + row * p.second_pitch + k, row < p.rows && k < p.second_k);
      }
    }

   private:
    int row_, column_, swap_;
    uint32_t bytes_[4], factors_[2];
  };
};

// The same bytes, contracted over N: 64 rows of 64 bytes in a stage, swizzled, in halves. Loads that transpose see two
// bytes as one value, so that a lane has four neighbouring columns of 32 that two warps share: even ones multiply the
// first two as the rows lane / 4 and 8 + lane / 4 of their 16, odd ones the last two.
struct PackedColumns : MnMajor<__nv_bfloat16> {
  static constexpr bool kHalves = false, kPacked = true;
  static constexpr int kRowBytes = 32, kPieces = 2, kDepth = 32, kBytes = 64;
  static constexpr int kWords = 256;  // of factors in a stage
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kDepth * kBytes, tile.column * kBytes, k + i * kDepth, tile.coordinate.near, tile.coordinate.far);
  }

  // The first factors of two rows for 32 columns in a word, then all second ones: [32 columns][half of the depth][pair
  // of rows that a lane has][step][half of it].
  template <class K>
  struct Scales {
    uint16_t rows[2][2];
    DEVICE void fetch(const PackedWeights& p, const WorkTile& tile, int block, int lane) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int64_t row = min(block * 64 + (lane / 2 + 16 * i) * 2 + odd, p.rows - 1);
          const int column = min(tile.column * 4 + lane % 2 * 2, p.blocks - 2);
          rows[i][odd] = __ldg(
              reinterpret_cast<const uint16_t*>(p.scales + (int64_t{tile.group} * p.rows + row) * p.blocks + column));
        }
    }
    DEVICE void put(uint32_t* to, int lane) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pair = lane / 2 + 16 * i, step = pair / 8;
        const int at = (step / 2 * 4 + pair % 4) * 4 + step % 2 * 2 + pair / 4 % 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const TwoFactors even = factors_of(rows[i][0] >> 8 * j & 0xFF), odd = factors_of(rows[i][1] >> 8 * j & 0xFF);
          uint32_t* word = to + (lane % 2 * 2 + j) * 32 + at;
          word[0] = ptx::permute<0x5410>(even.first, odd.first);
          word[kWords / 2] = ptx::permute<0x5410>(even.second, odd.second);
        }
      }
    }
  };

  class Lane {
   public:
    DEVICE Lane(int consumer, int warp, int lane)
        : chunk_(consumer * 2 + warp / 2),
          offset_(lane * kBytes + (chunk_ ^ (lane >> 1 & 3)) * 16),
          column_(chunk_ * 32 + lane / 4 * 4 + warp % 2 * 2),
          row_(lane % 4),
          shift_(warp % 2 * 8) {}
    template <int kStep>
    DEVICE void read(const uint8_t* bytes, const uint32_t* factors) {
      if constexpr (kStep % 2 == 0) {
        ptx::load_matrix_x4_transposed(words_, ptx::smem_address(bytes) + offset_ + kStep / 2 * kDepth * kBytes);
        const uint4* from = reinterpret_cast<const uint4*>(factors) + chunk_ * 8 + kStep / 2 * 4 + row_;
        first_ = from[0], second_ = from[kWords / 8];
#pragma unroll
        for (int i = 0; i < 4; ++i) words_[i] >>= shift_;
      }
    }
    template <int kStep>
    DEVICE void decode(uint32_t (&a)[4]) const {
      const uint32_t first[] = {kStep % 2 ? first_.z : first_.x, kStep % 2 ? first_.w : first_.y};
      const uint32_t second[] = {kStep % 2 ? second_.z : second_.x, kStep % 2 ? second_.w : second_.y};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = words_[kStep % 2 * 2 + half];
        a[half * 2] = scaled((word & 0x000F000F) * 0x1040 & 0x81C081C0, first[half], second[half]);
        a[half * 2 + 1] = scaled((word & 0x00F000F0) * 0x104 & 0x81C081C0, first[half], second[half]);
      }
    }
    DEVICE void read_second(const PackedWeights& p, const WorkTile& tile, int step, uint32_t (&a)[4]) const {
      const int column = tile.column * (2 * kBytes) + column_;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = step * 16 + row_ * 2 + half * 8;
        const int64_t at = tile.group * p.second_group + k * p.second_pitch + column;
        const bool exists = column < p.columns && k < p.second_k;
        const uint32_t even = read_pair(p, at, exists), odd = read_pair(p, at + p.second_pitch, exists);
        a[half * 2] = ptx::permute<0x5410>(even, odd), a[half * 2 + 1] = ptx::permute<0x7632>(even, odd);
      }
    }

   private:
    int chunk_, offset_, column_, row_, shift_;
    uint32_t words_[4];
    uint4 first_, second_;
  };

  // Both rows of the product that a lane has are neighbouring columns.
  template <class Out, int kTokens>
  DEVICE static void store_to_smem(const float* acc, uint8_t* subtile, int warp, int lane) {
    uint8_t* to = subtile + lane / 4 % 2 * 8 + warp % 2 * 4;
#pragma unroll
    for (int vector = 0; vector < kTokens / 8; ++vector)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float* x = acc + vector * 4 + odd;
        *reinterpret_cast<uint32_t*>(to + in_subtile(vector * 8 + lane % 4 * 2 + odd, warp / 2 * 4 + lane / 8)) =
            ptx::pack<Out>(x[0], x[2]);
      }
  }
};

}  // namespace fusible
