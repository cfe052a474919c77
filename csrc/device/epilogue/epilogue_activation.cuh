// SPDX-License-Identifier: Apache-2.0
// The epilogue that turns an output stage into activated rows.
#pragma once
#include "device/epilogue/epilogue_functions.cuh"
#include "device/epilogue/epilogue_vectors.cuh"
#include "device/functions/column_numbers.cuh"
#include "device/functions/element_numbers.cuh"

namespace fusible {

// postact = function(product, scales), and the product too if it is kept. kHalves: a tile's columns are as many of gate
// and of up.
template <bool kHalves, class Functions = BuiltInFunctions>
struct ActivationEpilogue {
  using Params = ActivationParams;
  static constexpr int kStoreWarps = 1, kRegisters = 120;  // beside the producer
  struct Scratch {};

  template <class K>
  DEVICE static void store_tiles(typename K::Storage& s, const Params& p, int consumer, int) {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = tma::policy_evict_first();
    each_smem_out<K>(s, consumer,
                     [&](const WorkTile& tile, int row, const SmemOutRows& rows, uint8_t* subtiles, auto wait) INLINE {
                       const RowScales scales(p.scales, rows.token, rows.rows, lane);
                       [[maybe_unused]] Numbers numbers;
                       if constexpr (Functions::kColumns > 0)
                         numbers.fetch(p, tile.group, first_column<K>(p, K::smem_out_column(tile, consumer), lane));
                       [[maybe_unused]] Elements elements[kRowsAhead];
                       if constexpr (Functions::kMatrices > 0) {
                         const int column = first_column<K>(p, K::smem_out_column(tile, consumer), lane);
#pragma unroll
                         for (int j = 0; j < kRowsAhead; ++j) fetch_row(elements[j], p, rows, j * 4 + lane / 8, column);
                       }
                       wait();
                       if (p.keep_preact && ptx::elect_one())
                         store_preact<K>(p, policy, tile, K::smem_out_column(tile, consumer), row, subtiles);
                       Functions::choose(p, [&](auto function) INLINE {
                         const int column = K::smem_out_column(tile, consumer);
                         if constexpr (Functions::kMatrices > 0)
                           activate<K, kHalves || function.kGated>(function, p, tile.group, column, rows, scales,
                                                                   numbers, elements, subtiles, lane);
                         else if constexpr (Functions::kColumns > 0)
                           activate<K, kHalves || function.kGated>(function, p, tile.group, column, rows, scales,
                                                                   numbers, subtiles, lane);
                         else if (kHalves || Functions::gated(p))
                           activate<K, true>(function, p, column, rows, scales, subtiles, lane);
                         else activate<K, false>(function, p, column, rows, scales, subtiles, lane);
                       });
                       if (p.keep_preact && ptx::elect_one()) tma::wait_read<0>();
                     });
    if (ptx::elect_one()) tma::wait_all();
  }

 protected:
  using Numbers = ColumnNumbers<typename Functions::Columns, Functions::kNarrow>;

  template <class K>
  DEVICE static void store_preact(const Params& p, uint64_t policy, const WorkTile& tile, int smem_out_column, int row,
                                  const uint8_t* subtiles) {
    constexpr int kSubtiles = K::Layout::kSubtiles;
    const int end = tile.row + tile.rows, map_row[2] = {p.shape.tokens - end + row, tile.tokens_start + end};
#pragma unroll
    for (int i = 0; i < kSubtiles; ++i) {
      if constexpr (kHalves) {
        const int column = smem_out_column * (K::kSmemOutColumns / 2) + i % (kSubtiles / 2) * 64;
        tma::store(&p.out, subtiles + i * kSubtileBytes, policy, column, i / (kSubtiles / 2), map_row[0], map_row[1]);
      } else {
        tma::store(&p.out, subtiles + i * kSubtileBytes, policy, smem_out_column * K::kSmemOutColumns + i * 64,
                   map_row[0], map_row[1], 0);
      }
    }
    tma::commit();
  }

  // Eight columns of a row of postact, from `column` on; `scale` is all that the function reads besides.
  template <class T, bool kGated, class F>
  DEVICE static uint4 vector(F function, const uint8_t* subtiles, int row, int column, int block, const float* scale) {
    const int first = kGated ? gate_vector_column(column, block) / 8 : column / 8;
    uint4 gate = *reinterpret_cast<const uint4*>(subtiles + subtile_offset(row, first)), up = ones<T>();
    if constexpr (kGated) {
      up = *reinterpret_cast<const uint4*>(subtiles + subtile_offset(row, first + up_distance(block) / 8));
      if constexpr (!kHalves) separate(gate, up, block);
    }
    return {pair<T>(function, gate.x, up.x, scale, scale), pair<T>(function, gate.y, up.y, scale, scale),
            pair<T>(function, gate.z, up.z, scale, scale), pair<T>(function, gate.w, up.w, scale, scale)};
  }

  // Eight columns of a row of postact: of the vectors `vector` of the product, and `distance` further.
  template <class T, bool kGated, class F, int kMatrices>
  DEVICE static uint4 vector_of_numbers(F function, const uint8_t* subtiles, int row, int vector, int distance,
                                        int block, float scale, const ColumnFloats<Functions::kColumns>& columns,
                                        const ColumnFloats<kMatrices>& elements) {
    uint4 gate = *reinterpret_cast<const uint4*>(subtiles + subtile_offset(row, vector)), up = ones<T>();
    if constexpr (kGated) {
      up = *reinterpret_cast<const uint4*>(subtiles + subtile_offset(row, vector + distance));
      if constexpr (!kHalves) separate(gate, up, block);
    }
    const auto of = [&](int i) INLINE { return FunctionNumbers(scale, columns, elements, i); };
    return {pair<T>(function, gate.x, up.x, of(0).values, of(1).values),
            pair<T>(function, gate.y, up.y, of(2).values, of(3).values),
            pair<T>(function, gate.z, up.z, of(4).values, of(5).values),
            pair<T>(function, gate.w, up.w, of(6).values, of(7).values)};
  }

 private:
  using Elements = ElementNumbers<typename Functions::Matrices, Functions::kColumns>;
  // A lane prefetches the element numbers of this many vectors, each four rows below the one before: as many as
  // registers allow.
  static constexpr int kRowsAhead = Elements::kBytes > 16 ? 2 : 4;

  // The first column of a lane, in the postact rows.
  template <class K>
  DEVICE static int first_column(const Params& p, int smem_out_column, int lane) {
    const bool gated = kHalves || Functions::gated(p);
    return smem_out_column * (gated ? K::kSmemOutColumns / 2 : K::kSmemOutColumns) + lane % 8 * 8;
  }

  template <class K, bool kGated, class F>
  DEVICE static void activate(F function, const Params& p, int smem_out_column, const SmemOutRows& rows,
                              const RowScales& scales, const uint8_t* subtiles, int lane) {
    using T = typename K::T;
    constexpr int kColumns = kGated ? K::kSmemOutColumns / 2 : K::kSmemOutColumns;
    const int block = kHalves ? kColumns : p.block;
    const int first_column = smem_out_column * kColumns + lane % 8 * 8;
    T* postact = static_cast<T*>(p.postact) + static_cast<size_t>(rows.token + lane / 8) * p.columns + first_column;
    for (int at = 0; at < rows.rows; at += 4, postact += static_cast<size_t>(4) * p.columns) {
      const float scale = Functions::kScales ? scales.of(at, lane) : 1.f;
      const int row = at + lane / 8;
#pragma unroll
      for (int i = 0; i < kColumns / 64; ++i) {
        const uint4 result = vector<T, kGated>(function, subtiles, row, i * 64 + lane % 8 * 8, block, &scale);
        if (row < rows.rows && first_column + i * 64 < p.columns) *reinterpret_cast<uint4*>(postact + i * 64) = result;
      }
    }
  }
  // For a function that reads numbers of columns: vector by vector, so that a lane holds the numbers of one at a time,
  // and fetches those of the next meanwhile.
  template <class K, bool kGated, class F>
  DEVICE static void activate(F function, const Params& p, int group, int smem_out_column, const SmemOutRows& rows,
                              const RowScales& scales, Numbers& numbers, const uint8_t* subtiles, int lane) {
    using T = typename K::T;
    constexpr int kColumns = kGated ? K::kSmemOutColumns / 2 : K::kSmemOutColumns;
    const int block = kHalves ? kColumns : p.block, distance = up_distance(block) / 8;
    const int first_column = smem_out_column * kColumns + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < kColumns / 64; ++i) {
      ColumnFloats<Functions::kColumns> floats;
      numbers.convert_to(floats);
      const int column = i * 64 + lane % 8 * 8, vector = kGated ? gate_vector_column(column, block) / 8 : column / 8;
      if (i + 1 < kColumns / 64) numbers.fetch(p, group, first_column + (i + 1) * 64);
      T* to =
          static_cast<T*>(p.postact) + static_cast<size_t>(rows.token + lane / 8) * p.columns + first_column + i * 64;
      for (int at = 0; at < rows.rows; at += 4, to += static_cast<size_t>(4) * p.columns) {
        const float scale = Functions::kScales ? scales.of(at, lane) : 1.f;
        const int row = at + lane / 8;
        const uint4 result = vector_of_numbers<T, kGated>(function, subtiles, row, vector, distance, block, scale,
                                                          floats, ColumnFloats<0>());
        if (row < rows.rows && first_column + i * 64 < p.columns) *reinterpret_cast<uint4*>(to) = result;
      }
    }
  }
  // For a function that reads numbers of elements: likewise, with those of the next rows prefetched.
  template <class K, bool kGated, class F>
  DEVICE static void activate(F function, const Params& p, int group, int smem_out_column, const SmemOutRows& rows,
                              const RowScales& scales, Numbers& numbers, Elements (&elements)[kRowsAhead],
                              const uint8_t* subtiles, int lane) {
    using T = typename K::T;
    constexpr int kColumns = kGated ? K::kSmemOutColumns / 2 : K::kSmemOutColumns;
    const int block = kHalves ? kColumns : p.block, distance = up_distance(block) / 8;
    const int first_column = smem_out_column * kColumns + lane % 8 * 8;
#pragma unroll 1
    for (int i = 0; i < kColumns / 64; ++i) {
      ColumnFloats<Functions::kColumns> floats;
      numbers.convert_to(floats);
      const int column = i * 64 + lane % 8 * 8, vector = kGated ? gate_vector_column(column, block) / 8 : column / 8;
      const bool exists = first_column + i * 64 < p.columns, more = i + 1 < kColumns / 64;
      if (more) numbers.fetch(p, group, first_column + (i + 1) * 64);
      T* to =
          static_cast<T*>(p.postact) + static_cast<size_t>(rows.token + lane / 8) * p.columns + first_column + i * 64;
#pragma unroll 1
      for (int at = 0; at < rows.rows; at += 4 * kRowsAhead) {
        const bool below = at + 4 * kRowsAhead < rows.rows;
        const int next = below ? at + 4 * kRowsAhead : 0, next_column = first_column + (i + !below) * 64;
#pragma unroll
        for (int j = 0; j < kRowsAhead; ++j, to += static_cast<size_t>(4) * p.columns) {
          const int row = at + j * 4 + lane / 8;
          ColumnFloats<Functions::kMatrices> now;
          elements[j].convert_to(now);
          if (below || more) fetch_row(elements[j], p, rows, next + j * 4 + lane / 8, next_column);
          const float scale = Functions::kScales ? scales.of(at + j * 4, lane) : 1.f;
          const uint4 result =
              vector_of_numbers<T, kGated>(function, subtiles, row, vector, distance, block, scale, floats, now);
          if (row < rows.rows && exists) *reinterpret_cast<uint4*>(to) = result;
        }
      }
    }
  }
  // If the row and the column exist.
  DEVICE static void fetch_row(Elements& elements, const Params& p, const SmemOutRows& rows, int row, int column) {
    if (row < rows.rows && column < p.columns) elements.fetch(p, rows.token + row, column);
  }
  // Activates two neighbouring columns, with the numbers that the function reads in each.
  template <class T, class F>
  DEVICE static uint32_t pair(F function, uint32_t gates, uint32_t ups, const float* first, const float* second) {
    const float2 gate = ptx::unpack<T>(gates), up = ptx::unpack<T>(ups);
    return ptx::pack<T>(function.forward(gate.x, up.x, first), function.forward(gate.y, up.y, second));
  }
};

}  // namespace fusible
