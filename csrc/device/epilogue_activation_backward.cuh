// The epilogue that turns the gradient of activated rows into that of their pre-activation.
#pragma once
#include "device/octet.cuh"

namespace fusible {

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
  DEVICE static void finish(typename K::Storage& s, const Params& p, int consumer, int warp) {
    const int lane = threadIdx.x % 32;
    each_deposit<K>(s, p, consumer, [&](const Tile& tile, int, const DepositedRows& rows, uint8_t* slabs, auto wait) INLINE {
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
