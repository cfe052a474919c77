// Epilogues that turn a deposit into activated rows, or the gradient of activated rows into that of their pre-activation.
//
// A whole warp of the producer's warpgroup finishes 64 rows while the consumers multiply the next tile. A quarter of it has a row, and
// every lane eight neighbouring columns of the hidden rows, an octet: 16 bytes. Everything is computed in fp32 from values that are
// rounded as the unfused kernels would have stored them, and rounded once.
#pragma once
#include "device/activation.cuh"
#include "device/epilogue.cuh"
#include "kernels/activation_entry.h"

namespace fusible {

DEVICE int slab_offset(int row, int octet) { return octet / 8 * kSlabBytes + in_slab(row, octet % 8); }

// Where the gate of the hidden columns `column` to `column + 7` begins in a row; their up is `up_distance` further. Where blocks are
// narrower than eight, the sixteen columns of both are neighbours.
DEVICE int gate_column(int column, int block) { return block < 8 ? 2 * column : column / block * 2 * block + column % block; }
DEVICE int up_distance(int block) { return block < 8 ? 8 : block; }

// Sixteen neighbouring columns in which blocks of 1, 2 or 4 of gate and up alternate, as eight of gate and eight of up; and back.
DEVICE void separate(uint4& first, uint4& second, int block) {
  const uint4 p = first, q = second;
  if (block == 1) {
    first = {__byte_perm(p.x, p.y, 0x5410), __byte_perm(p.z, p.w, 0x5410), __byte_perm(q.x, q.y, 0x5410), __byte_perm(q.z, q.w, 0x5410)};
    second = {__byte_perm(p.x, p.y, 0x7632), __byte_perm(p.z, p.w, 0x7632), __byte_perm(q.x, q.y, 0x7632), __byte_perm(q.z, q.w, 0x7632)};
  } else if (block == 2) {
    first = {p.x, p.z, q.x, q.z}, second = {p.y, p.w, q.y, q.w};
  } else if (block == 4) {
    first = {p.x, p.y, q.x, q.y}, second = {p.z, p.w, q.z, q.w};
  }
}
DEVICE void join(uint4& gate, uint4& up, int block) {
  const uint4 g = gate, u = up;
  if (block == 1) {
    gate = {__byte_perm(g.x, u.x, 0x5410), __byte_perm(g.x, u.x, 0x7632), __byte_perm(g.y, u.y, 0x5410), __byte_perm(g.y, u.y, 0x7632)};
    up = {__byte_perm(g.z, u.z, 0x5410), __byte_perm(g.z, u.z, 0x7632), __byte_perm(g.w, u.w, 0x5410), __byte_perm(g.w, u.w, 0x7632)};
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
  DEVICE RowScales(const RowScale& source, int token, int rows, int lane) : low_(at(source, token, rows, lane)), high_(at(source, token, rows, lane + 32)) {}
  // Of the row of this lane, of the four that begin at `first`; by the whole warp.
  DEVICE float of(int first, int lane) const { return __shfl_sync(~0u, first < 32 ? low_ : high_, first % 32 + lane / 8); }

 private:
  DEVICE static float at(const RowScale& source, int token, int rows, int i) {
    return source.data && i < rows ? read_number(source.data, source.type, token + i) : 1.f;
  }
  float low_, high_;
};

// Which 64 rows a deposit holds.
struct DepositedRows {
  int token, rows;  // the first one's place in the buffer, and how many exist
};

// Calls body(tile, first row in the group, deposited rows, their deposit, a function that waits for it) for every deposit of a consumer,
// and gives its room back.
template <class K, class Body>
DEVICE void each_deposit(typename K::Storage& s, const typename K::Params& p, int rank, int consumer, Body body) {
  typename K::Scheduler tiles(s.groups, s.tasks, p.shape, rank, true);
  Ring<K::Layout::kSlots> slot;
  for (Tile tile; tiles.next(tile);) {
    for (int block = 0, blocks = K::row_blocks(tile, consumer); block < blocks; ++block) {
      const int first = (consumer + block * kConsumers) * 64;
      const DepositedRows rows{tile.tokens_start + tile.row + first, min(64, tile.rows - first)};
      body(tile, tile.row + first, rows, s.deposits[consumer] + slot.stage * K::Layout::kPartBytes,
           [&]() INLINE { barrier_wait(&s.deposited[consumer][slot.stage], slot.phase); });
      barrier_arrive(&s.collected[consumer][slot.stage]);
      slot.advance();
    }
  }
}

// hidden = activation(product) * scales, and the product too if it is kept. kHalves: a tile's columns are as many of gate and of up.
template <bool kHalves>
struct ActivationEpilogue {
  using Params = ActivationParams;
  static constexpr int kFinishers = 1, kRegisters = 120;  // beside the producer
  struct Scratch {};

  template <class K>
  DEVICE static void finish(typename K::Storage& s, const Params& p, int rank, int consumer, int) {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = tma::policy_evict_first();
    each_deposit<K>(s, p, rank, consumer, [&](const Tile& tile, int row, const DepositedRows& rows, uint8_t* slabs, auto wait) INLINE {
      const RowScales scales(p.scales, rows.token, rows.rows, lane);
      wait();
      if (p.keep_pre && lane == 0) store_pre<K>(p, policy, tile, row, slabs);
      with_kind(p.activation, [&](auto kind) INLINE {
        if (kHalves || p.activation.gated) activate<K, true>(kind, p, tile.column, rows, scales, slabs, lane);
        else activate<K, false>(kind, p, tile.column, rows, scales, slabs, lane);
      });
      if (p.keep_pre && lane == 0) tma::wait_read<0>();
    });
    if (lane == 0) tma::wait_all();
  }

 private:
  template <class K>
  DEVICE static void store_pre(const Params& p, uint64_t policy, const Tile& tile, int row, const uint8_t* slabs) {
    constexpr int kSlabs = K::Layout::kSlabs;
    const int map_row[2] = {p.shape.tokens - tile.tokens + row, tile.tokens_start + tile.tokens};
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if constexpr (kHalves) {
        const int column = tile.column * (K::kTileN / 2) + i % (kSlabs / 2) * 64;
        tma::store(&p.out, slabs + i * kSlabBytes, policy, column, i / (kSlabs / 2), map_row[0], map_row[1]);
      } else {
        tma::store(&p.out, slabs + i * kSlabBytes, policy, tile.column * K::kTileN + i * 64, map_row[0], map_row[1], 0);
      }
    }
    tma::commit();
  }

  template <class K, bool kGated, class Kind>
  DEVICE static void activate(Kind kind, const Params& p, int tile_column, const DepositedRows& rows, const RowScales& scales, const uint8_t* slabs, int lane) {
    using T = typename K::T;
    constexpr int kColumns = kGated ? K::kTileN / 2 : K::kTileN;
    const Activation& a = p.activation;
    const int block = kHalves ? kColumns : p.block, distance = up_distance(block) / 8;
    const int first_column = tile_column * kColumns + lane % 8 * 8;
    T* hidden = static_cast<T*>(p.hidden) + static_cast<size_t>(rows.token + lane / 8) * p.columns + first_column;
    for (int at = 0; at < rows.rows; at += 4, hidden += static_cast<size_t>(4) * p.columns) {
      const float scale = scales.of(at, lane);
      const int row = at + lane / 8;
#pragma unroll
      for (int i = 0; i < kColumns / 64; ++i) {
        const int column = i * 64 + lane % 8 * 8, octet = kGated ? gate_column(column, block) / 8 : column / 8;
        uint4 gate = *reinterpret_cast<const uint4*>(slabs + slab_offset(row, octet)), up = ones<T>();
        if constexpr (kGated) {
          up = *reinterpret_cast<const uint4*>(slabs + slab_offset(row, octet + distance));
          if constexpr (!kHalves) separate(gate, up, block);
        }
        const uint4 result = {pair<T>(kind, a, gate.x, up.x, scale), pair<T>(kind, a, gate.y, up.y, scale),
                              pair<T>(kind, a, gate.z, up.z, scale), pair<T>(kind, a, gate.w, up.w, scale)};
        if (row < rows.rows && first_column + i * 64 < p.columns) *reinterpret_cast<uint4*>(hidden + i * 64) = result;
      }
    }
  }
  template <class T, class Kind>
  DEVICE static uint32_t pair(Kind kind, const Activation& a, uint32_t gates, uint32_t ups, float scale) {
    const float2 gate = ptx::unpack<T>(gates), up = ptx::unpack<T>(ups);
    const Inputs x = inputs<kind.kLimited>(a, gate.x, up.x), y = inputs<kind.kLimited>(a, gate.y, up.y);
    return ptx::pack<T>(evaluate<kind.kCurve, true>(x.gate, a.alpha).value * x.up * scale, evaluate<kind.kCurve, true>(y.gate, a.alpha).value * y.up * scale);
  }
};

// The product is the gradient of hidden = activation(pre) * scales. Gives that of pre, hidden itself, and each slab's share of
// <product, activation> by row; the last two if wanted. Every lane stages its octets of pre in shared memory, kSlots - 1 steps ahead
// of their use: as many registers are not to be had. Where nothing is gated, up is one, and neither loaded nor stored.
//
// kWarps share a deposit; a step of a warp is kTogether octets of each lane, which hide each other's latencies.
template <int kWarps, int kTogether>
struct ActivationBackwardEpilogue {
  using Params = ActivationParams;
  static constexpr int kFinishers = kWarps, kRegisters = 136;
  static constexpr int kSlots = 12 / (kConsumers * kWarps * kTogether), kStepRows = 4 * kTogether;
  struct Staged {
    uint4 gate[kTogether][32], up[kTogether][32];
  };
  struct Scratch {
    Staged slots[kConsumers * kWarps][kSlots];
  };

  template <class K>
  DEVICE static void finish(typename K::Storage& s, const Params& p, int rank, int consumer, int warp) {
    const int lane = threadIdx.x % 32;
    each_deposit<K>(s, p, rank, consumer, [&](const Tile& tile, int, const DepositedRows& rows, uint8_t* slabs, auto wait) INLINE {
      with_kind(p.activation, [&](auto kind) INLINE {
        differentiate<K>(kind, p, tile.column, rows, slabs, s.scratch.slots[consumer * kWarps + warp], warp, lane, wait);
      });
    });
  }

 private:
  // Walks this lane's octets: down the rows of a slab, then on to the next slab. Offsets are in elements.
  struct Cursor {
    int column, row;
    bool exists;  // the column
    size_t pre;   // offset of the gate
    DEVICE Cursor(const Params& p, int first_column, int first_row) : column(first_column), row(first_row) { place(p); }
    DEVICE void place(const Params& p) {
      exists = column < p.columns;
      pre = p.activation.gated ? gate_column(column, p.block) : column;
    }
    DEVICE void next_slab(const Params& p, int first_row) {
      column += 64, row = first_row;
      place(p);
    }
  };

  template <class K, class Kind, class Wait>
  DEVICE static void differentiate(Kind kind, const Params& p, int tile_column, const DepositedRows& rows, const uint8_t* slabs, Staged (&staged)[kSlots],
                                   int warp, int lane, Wait wait) {
    using T = typename K::T;
    const int first_row = warp * kStepRows;
    if (first_row >= rows.rows) return wait();
    constexpr int kStride = kStepRows * kWarps;
    const bool gated = p.activation.gated, narrow = gated && p.block < 8;
    const int width = gated ? 2 * p.columns : p.columns, distance = up_distance(p.block), row_of_lane = lane / 8;
    const int first_column = tile_column * K::kTileN + lane % 8 * 8, last_column = (tile_column + 1) * K::kTileN;
    const size_t token = rows.token + first_row + row_of_lane, quad = static_cast<size_t>(4) * width;

    Cursor loading(p, first_column, first_row);
    loading.pre += token * width;
    int load_slot = 0;
    const auto load = [&]() INLINE {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (loading.exists && loading.row + i * 4 + row_of_lane < rows.rows) {
          const T* from = static_cast<const T*>(p.pre) + loading.pre + i * quad;
          ptx::copy_async(&staged[load_slot].gate[i][lane], from);
          if (gated) ptx::copy_async(&staged[load_slot].up[i][lane], from + distance);
        }
      }
      ptx::copy_async_commit();
      load_slot = load_slot == kSlots - 1 ? 0 : load_slot + 1;
      loading.row += kStride, loading.pre += kStride / 4 * quad;
      if (loading.row >= rows.rows) {
        loading.next_slab(p, first_row);
        loading.pre += token * width;
        if (loading.column >= last_column) loading.exists = false;
      }
    };
#pragma unroll 1
    for (int i = 0; i < kSlots - 1; ++i) load();
    const RowScales scales(p.scales, rows.token, rows.rows, lane);
    float* shares = p.shares + static_cast<size_t>(tile_column) * (K::kTileN / 64) * p.shape.tokens + rows.token + row_of_lane;
    int slot = 0;
    wait();
#pragma unroll 1
    for (Cursor at(p, first_column, first_row); at.column < last_column; at.next_slab(p, first_row), slabs += kSlabBytes, shares += p.shape.tokens) {
      T* dpre = static_cast<T*>(p.dpre) + token * width + at.pre;
      T* hidden = static_cast<T*>(p.hidden) + token * p.columns + at.column;
#pragma unroll 1
      for (; at.row < rows.rows; at.row += kStride, dpre += kStride / 4 * quad, hidden += kStride * p.columns) {
        uint4 grad[kTogether], gate[kTogether], up[kTogether];
        float share[kTogether];
        ptx::copy_async_wait<kSlots - 2>();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          grad[i] = *reinterpret_cast<const uint4*>(slabs + in_slab(at.row + i * 4 + row_of_lane, lane % 8));
          gate[i] = staged[slot].gate[i][lane], up[i] = gated ? staged[slot].up[i][lane] : ones<T>();
          if (narrow) separate(gate[i], up[i], p.block);
        }
        slot = slot == kSlots - 1 ? 0 : slot + 1;
        load();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) share[i] = octet<T>(kind, p.activation, gate[i], up[i], grad[i], scales.of(at.row + i * 4, lane));
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (narrow) join(gate[i], up[i], p.block);
          if (at.exists && at.row + i * 4 + row_of_lane < rows.rows) {
            *reinterpret_cast<uint4*>(dpre + i * quad) = gate[i];
            if (gated) *reinterpret_cast<uint4*>(dpre + i * quad + distance) = up[i];
            if (p.hidden) *reinterpret_cast<uint4*>(hidden + i * 4 * p.columns) = grad[i];
          }
        }
        if (p.shares) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) share[i] = at.exists ? share[i] : 0.f;
#pragma unroll
          for (int offset = 4; offset; offset /= 2)
#pragma unroll
            for (int i = 0; i < kTogether; ++i) share[i] += __shfl_xor_sync(~0u, share[i], offset);
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
            if (lane % 8 == 0 && at.row + i * 4 + row_of_lane < rows.rows) shares[at.row + i * 4] = share[i];
        }
      }
    }
    ptx::copy_async_wait<0>();
  }

  // Gate and up give way to their gradients, the gradient of the hidden columns to what these are themselves. Returns their part of
  // <gradient, activation>.
  template <class T, class Kind>
  DEVICE static float octet(Kind kind, const Activation& a, uint4& gates, uint4& ups, uint4& grads, float scale) {
    float gate[8], up[8], grad[8], share = 0.f;
    unpack<T>(gates, gate), unpack<T>(ups, up), unpack<T>(grads, grad);
    float dgate[8], dup[8], hidden[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Inputs in = inputs<kind.kLimited>(a, gate[i], up[i]);
      const Point point = evaluate<kind.kCurve, true>(in.gate, a.alpha);
      const float scaled = grad[i] * scale, plain = point.value * in.up;
      share += grad[i] * plain;
      dgate[i] = in.gate_passes ? scaled * in.up * point.slope : 0.f;
      dup[i] = in.up_passes ? scaled * point.value : 0.f;
      hidden[i] = plain * scale;
    }
    gates = pack<T>(dgate), ups = pack<T>(dup), grads = pack<T>(hidden);
    return share;
  }
  template <class T>
  DEVICE static void unpack(const uint4& from, float (&to)[8]) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ptx::unpack<T>(words[i]);
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
  template <class T>
  DEVICE static uint4 pack(const float (&x)[8]) {
    return {ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]), ptx::pack<T>(x[6], x[7])};
  }
};

}  // namespace fusible
