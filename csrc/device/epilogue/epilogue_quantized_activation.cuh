// SPDX-License-Identifier: Apache-2.0
// The epilogue that turns an output stage of a product of e4m3 operands into activated rows of e4m3.
//
// An output stage has one or two blocks of 128 columns of the activated rows, each of which a quarter of a warp has in
// registers. The scale of a block is therefore known before its bytes are stored, and no value is read twice.
#pragma once
#include "device/epilogue/epilogue_activation.cuh"
#include "device/quantize/quantize.cuh"
#include "kernels/scaled/scaled_params.h"

namespace fusible {

// The bytes of function(product, scale), rounded as the product is, with their scales; and the product if it is kept.
// kStoreRegisters: of a thread that computes them. The consumers have the others.
template <bool kHalves, class Functions = BuiltInFunctions, int kStoreRegisters = kHalves ? 72 : 88>
struct QuantizedActivationEpilogue : ActivationEpilogue<kHalves, Functions> {
  using Params = QuantizedActivationParams;
  static constexpr int kStoreWarps = 1, kRegisters = kStoreRegisters;  // beside the producer; no spills

  template <class K>
  DEVICE static void store_tiles(typename K::Storage& s, const Params& p, int consumer, int) {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = tma::policy_evict_first();
    each_smem_out<K>(
        s, consumer, [&](const WorkTile& tile, int row, const SmemOutRows& rows, uint8_t* subtiles, auto wait) INLINE {
          const int column = K::smem_out_column(tile, consumer);
          const RowScales scales(p.scales, rows.token, rows.rows, lane);
          wait();
          if (p.keep_preact && ptx::elect_one())
            QuantizedActivationEpilogue::template store_preact<K>(p, policy, tile, column, row, subtiles);
          Functions::choose(p, [&](auto function) INLINE {
            if constexpr (Functions::kColumns > 0)
              quantize<K, kHalves || function.kGated>(function, p, tile.group, column, rows, scales, subtiles, lane);
            else if (kHalves || Functions::gated(p))
              quantize<K, true>(function, p, column, rows, scales, subtiles, lane);
            else quantize<K, false>(function, p, column, rows, scales, subtiles, lane);
          });
          if (p.keep_preact && ptx::elect_one()) tma::wait_read<0>();
        });
    if (ptx::elect_one()) tma::wait_all();
  }

 private:
  static constexpr int kHalfBlock = kScaleBlock / 2;  // a lane has eight of its columns

  // Four rows at a time, a quarter of the warp each: a lane has eight columns of either half of a block.
  template <class K, bool kGated, class F>
  DEVICE static void quantize(F function, const Params& p, int smem_out_column, const SmemOutRows& rows,
                              const RowScales& scales, const uint8_t* subtiles, int lane) {
    using T = typename K::Out;
    constexpr int kColumns = kGated ? K::kSmemOutColumns / 2 : K::kSmemOutColumns;
    const int width = kHalves ? kColumns : p.block, of_lane = lane % 8 * 8;
    for (int at = 0; at < rows.rows; at += 4) {
      const float scale = Functions::kScales ? scales.of(at, lane) : 1.f;
      const int row = at + lane / 8;
      const int64_t token = rows.token + row;
#pragma unroll 1
      for (int block = 0; block < kColumns / kScaleBlock; ++block) {
        const int first = block * kScaleBlock + of_lane, column = smem_out_column * kColumns + first;
        const bool exist[2] = {row < rows.rows && column < p.columns,
                               row < rows.rows && column + kHalfBlock < p.columns};
        Tile<T> vectors;  // two rows are used: the halves of the block
        uint32_t most = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int vector_column = first + half * kHalfBlock;
          vectors.set(half, QuantizedActivationEpilogue::template vector<T, kGated>(function, subtiles, row,
                                                                                    vector_column, width, &scale));
          if (exist[half]) most = Tile<T>::larger(most, largest_word(vectors, half));
        }
        encode_block(p, token, column, of_lane, exist, vectors, most);
      }
    }
  }
  // For a function that reads numbers of columns: block by block, so that a lane holds the numbers of one at a time.
  template <class K, bool kGated, class F>
  DEVICE static void quantize(F function, const Params& p, int group, int smem_out_column, const SmemOutRows& rows,
                              const RowScales& scales, const uint8_t* subtiles, int lane) {
    using T = typename K::Out;
    constexpr int kColumns = kGated ? K::kSmemOutColumns / 2 : K::kSmemOutColumns;
    const int width = kHalves ? kColumns : p.block, distance = up_distance(width) / 8, of_lane = lane % 8 * 8;
#pragma unroll 1
    for (int block = 0; block < kColumns / kScaleBlock; ++block) {
      const int first = block * kScaleBlock + of_lane, column = smem_out_column * kColumns + first;
      typename QuantizedActivationEpilogue::Numbers numbers[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) numbers[half].fetch(p, group, column + half * kHalfBlock);
      for (int at = 0; at < rows.rows; at += 4) {
        const float scale = Functions::kScales ? scales.of(at, lane) : 1.f;
        const int row = at + lane / 8;
        const int64_t token = rows.token + row;
        const bool exist[2] = {row < rows.rows && column < p.columns,
                               row < rows.rows && column + kHalfBlock < p.columns};
        Tile<T> vectors;
        uint32_t most = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int vector_column = first + half * kHalfBlock;
          const int vector = kGated ? gate_vector_column(vector_column, width) / 8 : vector_column / 8;
          ColumnFloats<Functions::kColumns> floats;
          numbers[half].stay_as_stored();
          numbers[half].convert_to(floats);
          vectors.set(half, QuantizedActivationEpilogue::template vector_of_numbers<T, kGated>(
                                function, subtiles, row, vector, distance, width, scale, floats, ColumnFloats<0>()));
          if (exist[half]) most = Tile<T>::larger(most, largest_word(vectors, half));
        }
        encode_block(p, token, column, of_lane, exist, vectors, most);
      }
    }
  }

  // Encodes a block of a row. `vectors`: a lane's part, in its first two rows; `most`: their largest magnitudes, for
  // rows that exist; `column`: the first column. Called by the whole warp.
  template <class T>
  DEVICE static void encode_block(const Params& p, int64_t token, int column, int of_lane, const bool (&exist)[2],
                                  const Tile<T>& vectors, uint32_t most) {
#pragma unroll
    for (int distance = 4; distance; distance /= 2) most = Tile<T>::larger(most, __shfl_xor_sync(~0u, most, distance));
    const Encoding encoding = encoding_of<T>(Tile<T>::largest(most), p.power_of_two);
    uint8_t* bytes = p.rows.data + token * p.columns + column;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::store_vector_if(exist[half], bytes + half * kHalfBlock, row_bytes(vectors, half, encoding.encode));
    if (of_lane == 0 && exist[0]) p.rows.scales[column / kScaleBlock * p.rows.scales_pitch + token] = encoding.decode;
  }
};

}  // namespace fusible
