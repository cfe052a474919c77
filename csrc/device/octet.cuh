// SPDX-License-Identifier: Apache-2.0
// What the epilogues of activations share: octets, which are eight neighbouring columns of the hidden rows, and their
// gates and ups.
//
// Whole warps finish 64 rows while the consumers multiply the next tile. A quarter of a warp has a row, and every lane
// an octet of it: 16 bytes. Everything is computed in fp32 from values that are rounded as the unfused kernels would
// have stored them, and rounded once.
#pragma once
#include "device/activation.cuh"
#include "device/epilogue.cuh"
#include "kernels/activation_entry.h"

namespace fusible {

DEVICE int subtile_offset(int row, int octet) { return octet / 8 * kSubtileBytes + in_subtile(row, octet % 8); }

// Where the gate of the hidden columns `column` to `column + 7` begins in a row; their up is `up_distance` further.
// Where blocks are narrower than eight, the sixteen columns of both are neighbours.
DEVICE int gate_vector_column(int column, int block) {
  return block < 8 ? 2 * column : column / block * 2 * block + column % block;
}
DEVICE int up_distance(int block) { return block < 8 ? 8 : block; }

// Sixteen neighbouring columns in which blocks of 1, 2 or 4 of gate and up alternate, as eight of gate and eight of up;
// and back.
DEVICE void separate(uint4& first, uint4& second, int block) {
  const uint4 p = first, q = second;
  if (block == 1) {
    first = {__byte_perm(p.x, p.y, 0x5410), __byte_perm(p.z, p.w, 0x5410), __byte_perm(q.x, q.y, 0x5410),
             __byte_perm(q.z, q.w, 0x5410)};
    second = {__byte_perm(p.x, p.y, 0x7632), __byte_perm(p.z, p.w, 0x7632), __byte_perm(q.x, q.y, 0x7632),
              __byte_perm(q.z, q.w, 0x7632)};
  } else if (block == 2) {
    first = {p.x, p.z, q.x, q.z}, second = {p.y, p.w, q.y, q.w};
  } else if (block == 4) {
    first = {p.x, p.y, q.x, q.y}, second = {p.z, p.w, q.z, q.w};
  }
}
DEVICE void join(uint4& gate, uint4& up, int block) {
  const uint4 g = gate, u = up;
  if (block == 1) {
    gate = {__byte_perm(g.x, u.x, 0x5410), __byte_perm(g.x, u.x, 0x7632), __byte_perm(g.y, u.y, 0x5410),
            __byte_perm(g.y, u.y, 0x7632)};
    up = {__byte_perm(g.z, u.z, 0x5410), __byte_perm(g.z, u.z, 0x7632), __byte_perm(g.w, u.w, 0x5410),
          __byte_perm(g.w, u.w, 0x7632)};
  } else if (block == 2) {
    gate = {g.x, u.x, g.y, u.y}, up = {g.z, u.z, g.w, u.w};
  } else if (block == 4) {
    gate = {g.x, g.y, u.x, u.y}, up = {g.z, g.w, u.z, u.w};
  }
}

// The ups of what is not gated.
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
  // Of the row of this lane, of the four that begin at `first`; by the whole warp.
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

// Which 64 rows an output stage holds.
struct SmemOutRows {
  int token, rows;  // the first one's place in the buffer, and how many exist
};

// Calls body(tile, first row in the group, rows, their output stage, a function that waits for it) for every
// output stage of a consumer, and gives its room back.
template <class K, class Body>
DEVICE void each_smem_out(typename K::Storage& s, const typename K::Params& p, int consumer, Body body) {
  static_assert(K::Layout::kRows == 64, "an output stage is as many rows as RowScales keeps");
  TileReader tiles(s.tasks);
  PipelineState<K::Layout::kSlots> slot;
  for (Tile tile; tiles.next(tile);) {
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
