// The epilogue that turns a deposit into activated rows.
#pragma once
#include "device/octet.cuh"

namespace fusible {

// hidden = activation(product) * scales, and the product too if it is kept. kHalves: a tile's columns are as many of
// gate and of up.
template <bool kHalves>
struct ActivationEpilogue {
  using Params = ActivationParams;
  static constexpr int kFinishers = 1, kRegisters = 120;  // beside the producer
  struct Scratch {};

  template <class K>
  DEVICE static void finish(typename K::Storage& s, const Params& p, int consumer, int) {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = tma::policy_evict_first();
    each_deposit<K>(s, p, consumer,
                    [&](const Tile& tile, int row, const DepositedRows& rows, uint8_t* slabs, auto wait) INLINE {
                      const RowScales scales(p.scales, rows.token, rows.rows, lane);
                      wait();
                      if (p.keep_pre && ptx::elect_one())
                        store_pre<K>(p, policy, tile, K::deposit_column(tile, consumer), row, slabs);
                      with_kind(p.activation, [&](auto kind) INLINE {
                        const int column = K::deposit_column(tile, consumer);
                        if (kHalves || p.activation.gated)
                          activate<K, true>(kind, p, column, rows, scales, slabs, lane);
                        else activate<K, false>(kind, p, column, rows, scales, slabs, lane);
                      });
                      if (p.keep_pre && ptx::elect_one()) tma::wait_read<0>();
                    });
    if (ptx::elect_one()) tma::wait_all();
  }

 private:
  template <class K>
  DEVICE static void store_pre(const Params& p, uint64_t policy, const Tile& tile, int deposit_column, int row,
                               const uint8_t* slabs) {
    constexpr int kSlabs = K::Layout::kSlabs;
    const int end = tile.row + tile.rows, map_row[2] = {p.shape.tokens - end + row, tile.tokens_start + end};
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if constexpr (kHalves) {
        const int column = deposit_column * (K::kDepositColumns / 2) + i % (kSlabs / 2) * 64;
        tma::store(&p.out, slabs + i * kSlabBytes, policy, column, i / (kSlabs / 2), map_row[0], map_row[1]);
      } else {
        tma::store(&p.out, slabs + i * kSlabBytes, policy, deposit_column * K::kDepositColumns + i * 64, map_row[0],
                   map_row[1], 0);
      }
    }
    tma::commit();
  }

  template <class K, bool kGated, class Kind>
  DEVICE static void activate(Kind kind, const Params& p, int deposit_column, const DepositedRows& rows,
                              const RowScales& scales, const uint8_t* slabs, int lane) {
    using T = typename K::T;
    constexpr int kColumns = kGated ? K::kDepositColumns / 2 : K::kDepositColumns;
    const Activation& a = p.activation;
    const int block = kHalves ? kColumns : p.block, distance = up_distance(block) / 8;
    const int first_column = deposit_column * kColumns + lane % 8 * 8;
    T* hidden = static_cast<T*>(p.hidden) + static_cast<size_t>(rows.token + lane / 8) * p.columns + first_column;
    for (int at = 0; at < rows.rows; at += 4, hidden += static_cast<size_t>(4) * p.columns) {
      const float scale = scales.of(at, lane);
      const int row = at + lane / 8;
#pragma unroll
      for (int i = 0; i < kColumns / 64; ++i) {
        const int column = i * 64 + lane % 8 * 8, octet = kGated ? gate_vector_column(column, block) / 8 : column / 8;
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
    return ptx::pack<T>(evaluate<kind.kCurve, true>(x.gate, a.alpha).value * x.up * scale,
                        evaluate<kind.kCurve, true>(y.gate, a.alpha).value * y.up * scale);
  }
};

}  // namespace fusible
