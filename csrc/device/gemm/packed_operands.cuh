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
// The factors of two scales, one in each half: PowerOfTwo<126> of both at once, where 254 is 126 + kMost.
DEVICE TwoFactors factors_of(uint32_t scales) {
  constexpr uint32_t kMost = PackedMXFP4::Factors::kMostInOne;
  const uint32_t larger = ptx::max_u16x2(scales, both(kMost)), nan = (scales + both(1)) & both(0x100);  // of byte 255
  return {(scales - larger + both(254)) << 7, (larger - both(kMost - 127)) << 7 | (nan - (nan >> 8))};
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
  class Scales {
   public:
    DEVICE Scales(const PackedWeights& p, const WorkTile& tile, int lane) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = min(tile.column * K::kTileN + lane + 32 * i, p.rows - 1);
        rows_[i] = reinterpret_cast<const uint16_t*>(p.scales + (int64_t{tile.group} * p.rows + row) * p.blocks);
      }
    }
    DEVICE void fetch(uint32_t (&pairs)[4], int block) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = __ldg(rows_[i] + block);
    }
    DEVICE static void put(const uint32_t (&pairs)[2], uint32_t* to, int lane) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t two = pairs[i / 2];
        const TwoFactors factors = factors_of(i % 2 ? ptx::permute<0x4342>(two, 0) : ptx::permute<0x4140>(two, 0));
        reinterpret_cast<uint2*>(to)[lane + 32 * i] = {ptx::permute<0x5410>(factors.first, factors.second),
                                                       ptx::permute<0x7632>(factors.first, factors.second)};
      }
    }

   private:
    const uint16_t* rows_[4];
  };

  // A lane's place in a stage, and what it has read there, for both halves.
  class Lane {
   public:
    DEVICE Lane(int consumer, int warp, int lane)
        : row_(consumer * 64 + warp * 16 + lane / 4), column_(lane % 4), swap_(lane >> 4) {}
    // Reads the bytes and factors of half a stage: two steps.
    template <int kHalf>
    DEVICE void read(const uint8_t* bytes, const uint32_t* factors) {
      const uint8_t* from = bytes + row_ * kRowBytes + (kHalf ^ swap_) * 16 + column_;
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes_[kHalf][i][lower] = from[lower * 8 * kRowBytes + i * 4];
        factors_[kHalf][lower] = factors[(row_ + lower * 8) * 2 + kHalf];
      }
    }
    template <int kStep>
    DEVICE void decode(uint32_t (&a)[4]) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // magnitudes from bits 6 and 22 on, signs at 9 and 25
        const uint32_t spread = bytes_[kStep / 2][kStep % 2 * 2 + i / 2][i % 2] * 0x40040;
        const uint32_t factors = factors_[kStep / 2][i % 2];
        a[i] = scaled(spread & 0x01C001C0, ptx::permute<0x1010>(factors, 0) ^ (spread << 6 & 0x80008000),
                      ptx::permute<0x3232>(factors, 0));
      }
    }
    // The second pair's weights: loaded from device memory early, and arranged as the operand when they are multiplied.
    DEVICE void fetch_second(const PackedWeights& p, const WorkTile& tile, int step, uint32_t (&pairs)[4]) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile.column * (kPieces * kRows) + row_ + i % 2 * 8, k = step * 16 + column_ * 2 + i / 2 * 8;
        pairs[i] = read_pair(p, tile.group * p.second_group + row * p.second_pitch + k, row < p.rows && k < p.second_k);
      }
    }
    DEVICE static void arrange_second(uint32_t (&)[4]) {}  // they lie as the operand wants them

   private:
    int row_, column_, swap_;
    uint32_t bytes_[2][4][2], factors_[2][2];  // of both halves of a stage
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
  class Scales {
   public:
    DEVICE Scales(const PackedWeights& p, const WorkTile& tile, int lane)
        : first_(p.scales + int64_t{tile.group} * p.rows * p.blocks +
                 min(tile.column * 4 + lane % 2 * 2, p.blocks - 2)),
          row_(lane / 2 * 2),
          last_(p.rows - 1),
          pitch_(p.blocks) {}
    DEVICE void fetch(uint32_t (&pairs)[4], int block) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = min(block * 64 + row_ + i / 2 * 32 + i % 2, last_);
        pairs[i] = __ldg(reinterpret_cast<const uint16_t*>(first_ + row * pitch_));
      }
    }
    DEVICE static void put(const uint32_t (&pairs)[2], uint32_t* to, int lane) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pair = lane / 2 + 16 * i, step = pair / 8;
        const int at = (step / 2 * 4 + pair % 4) * 4 + step % 2 * 2 + pair / 4 % 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const TwoFactors factors = factors_of(pairs[i] >> 8 * j & both(0xFF));
          uint32_t* word = to + (lane % 2 * 2 + j) * 32 + at;
          word[0] = factors.first;
          word[kWords / 2] = factors.second;
        }
      }
    }

   private:
    const uint8_t* first_;
    int row_, last_, pitch_;
  };

  class Lane {
   public:
    DEVICE Lane(int consumer, int warp, int lane)
        : chunk_(consumer * 2 + warp / 2),
          offset_(lane * kBytes + (chunk_ ^ (lane >> 1 & 3)) * 16),
          column_(chunk_ * 32 + lane / 4 * 4 + warp % 2 * 2),
          row_(lane % 4),
          shift_(warp % 2 * 8) {}
    template <int kHalf>
    DEVICE void read(const uint8_t* bytes, const uint32_t* factors) {
      ptx::load_matrix_x4_transposed(words_[kHalf], ptx::smem_address(bytes) + offset_ + kHalf * kDepth * kBytes);
      const uint4* from = reinterpret_cast<const uint4*>(factors) + chunk_ * 8 + kHalf * 4 + row_;
      first_[kHalf] = from[0], second_[kHalf] = from[kWords / 8];
    }
    template <int kStep>
    DEVICE void decode(uint32_t (&a)[4]) const {
      constexpr int kHalf = kStep / 2;
      const uint32_t first[] = {kStep % 2 ? first_[kHalf].z : first_[kHalf].x,
                                kStep % 2 ? first_[kHalf].w : first_[kHalf].y};
      const uint32_t second[] = {kStep % 2 ? second_[kHalf].z : second_[kHalf].x,
                                 kStep % 2 ? second_[kHalf].w : second_[kHalf].y};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = words_[kHalf][kStep % 2 * 2 + half] >> shift_;
        a[half * 2] = scaled((word & 0x000F000F) * 0x1040 & 0x81C081C0, first[half], second[half]);
        a[half * 2 + 1] = scaled((word & 0x00F000F0) * 0x104 & 0x81C081C0, first[half], second[half]);
      }
    }
    DEVICE void fetch_second(const PackedWeights& p, const WorkTile& tile, int step, uint32_t (&pairs)[4]) const {
      const int column = tile.column * (2 * kBytes) + column_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = step * 16 + row_ * 2 + i / 2 * 8;
        const int64_t at = tile.group * p.second_group + (k + i % 2) * p.second_pitch + column;
        pairs[i] = read_pair(p, at, column < p.columns && k < p.second_k);
      }
    }
    DEVICE static void arrange_second(uint32_t (&pairs)[4]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t even = pairs[half * 2], odd = pairs[half * 2 + 1];
        pairs[half * 2] = ptx::permute<0x5410>(even, odd), pairs[half * 2 + 1] = ptx::permute<0x7632>(even, odd);
      }
    }

   private:
    int chunk_, offset_, column_, row_, shift_;
    uint32_t words_[2][4];
    uint4 first_[2], second_[2];
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
