// SPDX-License-Identifier: Apache-2.0
// The epilogue that stores each row where it is summed: in the buffer of another rank, over the link.
#pragma once
#include "device/epilogue/epilogue_vectors.cuh"
#include "fusible/row_slots.h"

namespace fusible {

// The destination of a row of a rank; null if the lane has failed.
DEVICE void* slot_of(const RowSlots& s, int64_t row, int64_t row_bytes) {
  if (s.state->failed) return nullptr;
  const int slot = s.slot_of_row[s.firsts[s.peers.rank] + row], slots = static_cast<int>(s.slots);
  return reinterpret_cast<void*>(s.peers.buffers[slot / slots] + s.at + slot % slots * row_bytes);
}

struct SlotsEpilogue {
  using Params = WithRowSlots<GemmParams>;
  static constexpr int kStoreWarps = 1, kRegisters = 120;
  struct Scratch {};

  template <class K>
  DEVICE static void store_tiles(typename K::Storage& s, const Params& p, int consumer, int) {
    using T = typename K::T;
    const int lane = threadIdx.x % 32, columns = p.epilogue.columns;
    each_smem_out<K>(
        s, consumer, [&](const WorkTile& tile, int, const SmemOutRows& rows, uint8_t* subtiles, auto wait) INLINE {
          const auto address = [&](int row) INLINE {
            const int64_t bytes = columns * static_cast<int>(sizeof(T));
            return row < rows.rows ? reinterpret_cast<uint64_t>(slot_of(p.slots, rows.token + row, bytes)) : 0;
          };
          const uint64_t low = address(lane), high = address(lane + 32);
          const int first = K::smem_out_column(tile, consumer) * K::kSmemOutColumns + lane % 8 * 8;
          wait();
          for (int at = 0; at < rows.rows; at += 4) {
            const int row = at + lane / 8;
            T* to = reinterpret_cast<T*>(__shfl_sync(~0u, at < 32 ? low : high, row % 32));
#pragma unroll
            for (int i = 0; i < K::kSmemOutColumns / 64; ++i) {
              const int column = first + i * 64;
              if (to && column < columns)
                *reinterpret_cast<uint4*>(to + column) =
                    *reinterpret_cast<const uint4*>(subtiles + subtile_offset(row, i * 8 + lane % 8));
            }
          }
        });
  }
};

}  // namespace fusible
