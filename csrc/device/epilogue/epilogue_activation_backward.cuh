// SPDX-License-Identifier: Apache-2.0
// The epilogue that turns the gradient of activated rows into the gradient of their pre-activation.
#pragma once
#include "device/epilogue/epilogue_functions.cuh"
#include "device/epilogue/epilogue_vectors.cuh"
#include "device/functions/column_numbers.cuh"

namespace fusible {

// The product is the gradient of postact = function(preact, scales). The epilogue writes dpreact. If they are wanted,
// it also writes postact, partial sums by row of the gradient of the scales (one for each subtile of columns), and
// partial sums of dpreact by column for the gradient of the bias (one for each 64 rows); and likewise the gradients of
// column operands of a user's function. Where nothing is gated, up is one, and neither loaded nor stored.
//
// A warp has a subtile of a consumer. A step is four rows of it, an 8-wide vector of each lane; or eight rows, two
// vectors, which hide each other's latencies, where there are registers for them. Every lane stages its vectors of
// preact in shared memory, two vectors ahead of their use.
template <class Functions = BuiltInFunctions>
struct ActivationBackwardEpilogue {
  using Params = ActivationParams;
  // Numbers of columns and their sums need registers, which the consumers can spare.
  static constexpr int kStoreWarps = 3, kRegisters = Functions::kColumns > 0 ? 120 : 104;
  static constexpr int kStagedVectors = 2;
  struct Staged {
    uint4 gate[kStagedVectors][32], up[kStagedVectors][32];
  };
  struct Scratch {
    Staged staged[kConsumers * kStoreWarps];
  };

  template <class K>
  DEVICE static void store_tiles(typename K::Storage& s, const Params& p, int consumer, int warp) {
    static_assert(K::Layout::kSubtiles == kStoreWarps && K::Layout::kSlots == 1, "a warp for each subtile of a tile");
    Staged& staged = s.scratch.staged[consumer * kStoreWarps + warp];
    const int lane = threadIdx.x % 32;
    each_smem_out<K>(s, consumer,
                     [&](const WorkTile& tile, int row, const SmemOutRows& rows, uint8_t* subtiles, auto wait) INLINE {
                       const RowScales scales(p.scales, rows.token, rows.rows, lane);
                       const int64_t block = block_of_rows(tile.group, tile.tokens_start, row);
                       const int subtile = tile.column * kStoreWarps + warp;  // in the row
                       const uint8_t* grads = subtiles + warp * kSubtileBytes;
                       Functions::choose(p, [&](auto function) INLINE {
                         using T = typename K::T;
                         if (function.kVectors == 2 && Functions::gated(p) && !Functions::narrow(p))
                           differentiate_subtile<T, true>(function, p, tile.group, rows, subtile, block, scales, grads,
                                                          staged, lane, wait);
                         else
                           differentiate_subtile<T, false>(function, p, tile.group, rows, subtile, block, scales, grads,
                                                           staged, lane, wait);
                       });
                     });
  }

 private:
  using Floats = ColumnFloats<Functions::kColumns>;
  using Sums = ColumnFloats<Functions::kSums>;

  // One subtile. kWholeVectors: gate and up are there, each in vectors of its own.
  template <class T, bool kWholeVectors, class F, class Wait>
  DEVICE static void differentiate_subtile(F function, const Params& p, int group, const SmemOutRows& rows, int subtile,
                                           int64_t block, const RowScales& scales, const uint8_t* grads, Staged& staged,
                                           int lane, Wait wait) {
    constexpr int kTogether = kWholeVectors ? 2 : 1, kStepRows = 4 * kTogether,
                  kStepsAhead = kStagedVectors / kTogether;
    const bool gated = kWholeVectors || Functions::gated(p), narrow = !kWholeVectors && gated && Functions::narrow(p);
    const int width = gated ? 2 * p.columns : p.columns, row_of_lane = lane / 8, column = subtile * 64 + lane % 8 * 8;
    const int distance = gated ? up_distance(p.block) : 0,
              gate_at = gated ? gate_vector_column(column, p.block) : column;
    const bool exists = column < p.columns;
    const int first_token = rows.token + row_of_lane;
    const size_t quad = static_cast<size_t>(4) * width, postact_quad = static_cast<size_t>(4) * p.columns;
    const T* preact = static_cast<const T*>(p.preact) + static_cast<size_t>(first_token) * width + gate_at;
    T* dpreact = static_cast<T*>(p.dpreact) + static_cast<size_t>(first_token) * width + gate_at;
    T* postact = static_cast<T*>(p.postact) + static_cast<size_t>(first_token) * p.columns + column;
    const auto valid = [&](int row, int i) INLINE { return exists && row + i * 4 + row_of_lane < rows.rows; };
    const auto staged_vector = [](int row, int i)
                                   INLINE { return kTogether == kStagedVectors ? i : row / 4 % kStagedVectors; };
    const auto load = [&](int row) INLINE {
#pragma unroll
      for (int i = 0; i < kTogether; ++i, preact += quad) {
        const int to = staged_vector(row, i);
        if (valid(row, i)) {
          ptx::copy_async(&staged.gate[to][lane], preact);
          if (gated) ptx::copy_async(&staged.up[to][lane], preact + distance);
        }
      }
      ptx::copy_async_commit();
    };
#pragma unroll
    for (int step = 0; step < kStepsAhead; ++step) load(step * kStepRows);
    float4 sums{};
    [[maybe_unused]] ColumnNumbers<typename Functions::Columns, Functions::kNarrow> numbers;
    if constexpr (Functions::kColumns > 0) numbers.fetch(p, group, column);
    wait();
    Sums dvectors{};
#pragma unroll 1
    for (int row = 0; row < rows.rows; row += kStepRows) {
      const int of_eight = kTogether == 2 ? 0 : row % 8;  // rows before, of the eight of a swizzle
      uint4 grad[kTogether], gate[kTogether], up[kTogether];
      float share[kTogether];
      ptx::copy_async_wait<kStepsAhead - 1>();
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int from = staged_vector(row, i);
        grad[i] = *reinterpret_cast<const uint4*>(grads + (row - of_eight) * 128 +
                                                  in_subtile(of_eight + i * 4 + row_of_lane, lane % 8));
        gate[i] = staged.gate[from][lane], up[i] = gated ? staged.up[from][lane] : ones<T>();
        if (narrow) separate(gate[i], up[i], p.block);
      }
      load(row + kStagedVectors * 4);
      Floats floats;
      numbers.stay_as_stored();
      numbers.convert_to(floats);
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        share[i] = differentiate_vector<T>(function, gate[i], up[i], grad[i],
                                           Functions::kScales ? scales.of(row + i * 4, lane) : 1.f, floats,
                                           Functions::kSums > 0 && valid(row, i), dvectors);
#pragma unroll
      for (int i = 0; i < kTogether; ++i, dpreact += quad, postact += postact_quad) {
        if (narrow) join(gate[i], up[i], p.block);
        if (valid(row, i)) {
          *reinterpret_cast<uint4*>(dpreact) = gate[i];
          if (gated) *reinterpret_cast<uint4*>(dpreact + distance) = up[i];
          if (p.postact) *reinterpret_cast<uint4*>(postact) = grad[i];
        }
      }
      if (p.dbias_partials) {
        constexpr int kLast = kTogether - 1;
        const float4 more = sums_of_rows<T>(valid(row, 0), gate[0], up[0], kTogether == 2 && valid(row, 1), gate[kLast],
                                            up[kLast], lane);
        sums.x += more.x, sums.y += more.y, sums.z += more.z, sums.w += more.w;
      }
      if (Functions::kScales && p.dscale_partials) {
        float* to = p.dscale_partials + static_cast<size_t>(subtile) * p.shape.tokens + rows.token;
        store_dscale_partials(exists ? share[0] : 0.f, exists ? share[kTogether - 1] : 0.f, to, row,
                              kTogether == 2 ? rows.rows : min(rows.rows, row + 4), lane);
      }
    }
    ptx::copy_async_wait<0>();
    if constexpr (Functions::kSums > 0) store_dvector_partials(p, dvectors, block, column, lane);
    const bool of_up = lane & 16;
    if (p.dbias_partials && exists && (gated || !of_up))
      *reinterpret_cast<float4*>(p.dbias_partials + block * width + gate_at + of_up * distance + (lane & 8) / 2) = sums;
  }

  // Stores the sums for the rows `row` + lane / 8 and four further, over the eight lanes of a row.
  DEVICE static void store_dscale_partials(float first, float second, float* to, int row, int rows, int lane) {
    const bool of_second = lane & 4;
    float share = (of_second ? second : first) + __shfl_xor_sync(~0u, of_second ? first : second, 4);
    share += __shfl_xor_sync(~0u, share, 2);
    share += __shfl_xor_sync(~0u, share, 1);
    const int at = row + of_second * 4 + lane / 8;
    if (lane % 4 == 0 && at < rows) to[at] = share;
  }
  // Sums a lane's sixteen columns of two rows, if valid, with the lanes that have the same columns in other rows. A
  // lane gets four columns: the lower half of the warp columns of the gate; the second quarter of each half the last
  // four.
  template <class T>
  DEVICE static float4 sums_of_rows(bool first_valid, const uint4& first_gate, const uint4& first_up, bool second_valid,
                                    const uint4& second_gate, const uint4& second_up, int lane) {
    const bool of_up = lane & 16, of_end = lane & 8;
    float gate[8] = {}, up[8] = {};
    if (first_valid) add<T>(first_gate, gate), add<T>(first_up, up);
    if (second_valid) add<T>(second_gate, gate), add<T>(second_up, up);
    float half[8], quarter[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) half[i] = (of_up ? up[i] : gate[i]) + __shfl_xor_sync(~0u, of_up ? gate[i] : up[i], 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      quarter[i] = (of_end ? half[4 + i] : half[i]) + __shfl_xor_sync(~0u, of_end ? half[i] : half[4 + i], 8);
    return {quarter[0], quarter[1], quarter[2], quarter[3]};
  }

  // Replaces gate and up by their gradients, and the gradients of the postact columns by the postact values. Returns
  // their part of the gradient of the scale, and adds the gradients of column operands if the row exists.
  template <class T, class F>
  DEVICE static float differentiate_vector(F function, uint4& gates, uint4& ups, uint4& grads, float scale,
                                           const Floats& floats, bool exists, Sums& dvectors) {
    float gate[8], up[8], grad[8], share = 0.f;
    convert_words<T>(gate, gates), convert_words<T>(up, ups), convert_words<T>(grad, grads);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const FunctionNumbers numbers(scale, floats, ColumnFloats<0>(), i);
      const Gradients<1 + Functions::kColumns> d = function.backward(gate[i], up[i], numbers.values, grad[i]);
      share += d.dr[0];
#pragma unroll
      for (int j = 0; j < Functions::kSums; ++j)
        if (exists) dvectors.of[j][i] += d.dr[1 + j];
      gate[i] = d.dx, up[i] = d.du, grad[i] = d.y;
    }
    gates = rounded_words<T>(gate), ups = rounded_words<T>(up), grads = rounded_words<T>(grad);
    return share;
  }
  template <class T>
  DEVICE static void add(const uint4& vector, float (&sum)[8]) {
    float x[8];
    convert_words<T>(x, vector);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i];
  }
};

}  // namespace fusible
