// SPDX-License-Identifier: Apache-2.0
// The common part of the epilogues of activations: 8-wide vectors, which are eight neighbouring columns of the postact
// rows, and their gates and ups.
//
// Whole warps store 64 rows while the consumers multiply the next tile. A quarter of a warp has a row, and every lane
// a vector of it: 16 bytes. Everything is computed in fp32 from values that are rounded as the unfused kernels would
// have stored them, and rounded once.
#pragma once
#include "device/epilogue/epilogue.cuh"
#include "kernels/activation/activation_params.h"

namespace fusible {

DEVICE int subtile_offset(int row, int vector) { return vector / 8 * kSubtileBytes + in_subtile(row, vector % 8); }

// The first gate column in a row for the postact columns `column` to `column + 7`; their up is `up_distance` further.
// If blocks are narrower than eight, the sixteen columns of both are neighbours.
DEVICE int gate_vector_column(int column, int block) {
  return block < 8 ? 2 * column : column / block * 2 * block + column % block;
}
DEVICE int up_distance(int block) { return block < 8 ? 8 : block; }

// Exchanges the second and the third quarter of every 4 * kWidth of sixteen columns.
template <int kWidth>
DEVICE void exchange_middle(uint4& first, uint4& second) {
  const uint4 p = first, q = second;
  const auto low = [](uint32_t x, uint32_t y) INLINE { return __byte_perm(x, y, 0x5410); };
  const auto high = [](uint32_t x, uint32_t y) INLINE { return __byte_perm(x, y, 0x7632); };
  if constexpr (kWidth == 1) {
    first = {low(p.x, p.y), high(p.x, p.y), low(p.z, p.w), high(p.z, p.w)};
    second = {low(q.x, q.y), high(q.x, q.y), low(q.z, q.w), high(q.z, q.w)};
  } else if constexpr (kWidth == 2) {
    first = {p.x, p.z, p.y, p.w}, second = {q.x, q.z, q.y, q.w};
  } else {
    first = {p.x, p.y, q.x, q.y}, second = {p.z, p.w, q.z, q.w};
  }
}
// Calls body(block) with a block of 1, 2 or 4 columns that the compiler knows; not at all for wider ones.
template <class Body>
DEVICE void with_narrow_block(int block, Body body) {
  if (block == 1) body(std::integral_constant<int, 1>());
  else if (block == 2) body(std::integral_constant<int, 2>());
  else if (block == 4) body(std::integral_constant<int, 4>());
}
// Sixteen neighbouring columns in which blocks of 1, 2 or 4 of gate and up alternate, as eight of gate and eight of up;
// and back. An exchange joins blocks of one kind to blocks of twice the width, and splits them as well.
DEVICE void separate(uint4& first, uint4& second, int block) {
  with_narrow_block(block, [&](auto width) INLINE {
    if constexpr (width.value <= 1) exchange_middle<1>(first, second);
    if constexpr (width.value <= 2) exchange_middle<2>(first, second);
    exchange_middle<4>(first, second);
  });
}
DEVICE void join(uint4& gate, uint4& up, int block) {
  with_narrow_block(block, [&](auto width) INLINE {
    exchange_middle<4>(gate, up);
    if constexpr (width.value <= 2) exchange_middle<2>(gate, up);
    if constexpr (width.value <= 1) exchange_middle<1>(gate, up);
  });
}

// The up values of an activation without a gate.
template <class T>
DEVICE uint4 ones() {
  const uint32_t one = ptx::pack<T>(1.f, 1.f);
  return {one, one, one, one};
}

// The scales of 64 rows, two in each lane: fetched before they are needed, as device memory is slow.
class RowScales {
 public:
  DEVICE RowScales(const RowScale& source, int token, int rows, int lane)
      : low_(at(source, token, rows, lane)), high_(at(source, token, rows, lane + 32)) {}
  // The value for this lane's row, one of the four from `first` on; called by the whole warp.
  DEVICE float of(int first, int lane) const {
    return __shfl_sync(~0u, first < 32 ? low_ : high_, (first + lane / 8) % 32);
  }

 private:
  DEVICE static float at(const RowScale& source, int token, int rows, int i) {
    return source.data && i < rows ? read_number(source.data, source.type, token + i) : 1.f;
  }
  float low_, high_;
};

// The number of a group's block of 64 rows that begins at `row`: no other group's, as each may leave a rest.
DEVICE int64_t block_of_rows(int group, int group_start, int row) { return group_start / 64 + group + row / 64; }

// The 64 rows that an output stage holds.
struct SmemOutRows {
  int token, rows;  // the first one's place in the buffer, and how many exist
};

// Calls body(tile, first row in the group, rows, their output stage, a function that waits for it) for every
// output stage of a consumer, and gives its room back.
template <class K, class Body>
DEVICE void each_smem_out(typename K::Storage& s, int consumer, Body body) {
  static_assert(K::Layout::kRows == 64, "an output stage is as many rows as RowScales keeps");
  WorkTileReader tiles(s.work);
  PipelineState<K::Layout::kSlots> slot;
  for (WorkTile tile; tiles.next(tile);) {
    for (int block = 0, blocks = K::row_blocks(tile, consumer); block < blocks; ++block) {
      const int first = K::first_row(consumer, block);
      const SmemOutRows rows{tile.tokens_start + tile.row + first, min(64, tile.rows - first)};
      body(tile, tile.row + first, rows, s.smem_out[consumer] + slot.stage * K::Layout::kPartBytes,
           [&]() INLINE { barrier_wait(&s.out_full[consumer][slot.stage], slot.phase); });
      barrier_arrive(&s.out_empty[consumer][slot.stage]);
      slot.advance();
    }
  }
}

}  // namespace fusible
