// The epilogue that turns the gradient of activated rows into that of their pre-activation.
#pragma once
#include "device/octet.cuh"

namespace fusible {

// The product is the gradient of hidden = activation(pre) * scales. Gives that of pre, hidden itself, and each slab's share of
// <product, activation> by row; the last two if wanted. This takes a warp several times as long as a multiplication, mostly latencies
// that follow one another, so as many warps as there are share every deposit: a step of a warp is four rows of a slab. Pre is
// loaded a step ahead, and a share is summed up a step later, beside the next step's arithmetic.
struct ActivationBackwardEpilogue {
  using Params = ActivationParams;
  static constexpr int kFinishers = 7;  // three beside the producer, and a warpgroup

  template <class K>
  DEVICE static void finish(typename K::Storage& s, const Params& p, int rank, int warp) {
    static_assert(K::kRowBlocks == 1 && K::Layout::kSlots == 1, "a tile is one deposit of each consumer");
    const int lane = threadIdx.x % 32;
    typename K::Scheduler tiles(s.groups, s.tasks, p.shape, rank, true);
    uint32_t phases = 0;  // of each consumer's deposits, a bit
    Share last;
    for (Tile tile; tiles.next(tile);) {
      const int deposits = K::row_blocks(tile, 0) + K::row_blocks(tile, 1);
      if (deposits == 0) continue;
      with_kind(p.activation, [&](auto kind) INLINE {
        if (p.activation.gated && p.block < 8) differentiate<K, true>(kind, s, p, tile, deposits, phases, last, warp, lane);
        else differentiate<K, false>(kind, s, p, tile, deposits, phases, last, warp, lane);
      });
      phases ^= (1u << deposits) - 1;
    }
    last.settle(lane);
  }

 private:
  struct Octet {
    uint4 gate, up;
  };
  // A step's share, to be summed over the quarter of a warp, and where it belongs; null for nowhere.
  struct Share {
    float value = 0.f;
    float* to = nullptr;
    DEVICE void settle(int lane) const {
      float sum = value;
#pragma unroll
      for (int offset = 4; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (to && lane % 8 == 0) *to = sum;
    }
  };

  // kNarrow: blocks of gate and up are narrower than an octet. What is not gated has ups of one, which are not stored.
  template <class K, bool kNarrow, class Kind>
  DEVICE static void differentiate(Kind kind, typename K::Storage& s, const Params& p, const Tile& tile, int deposits, uint32_t phases, Share& last,
                                   int warp, int lane) {
    using T = typename K::T;
    constexpr int kSlabs = K::Layout::kSlabs, kSteps = kSlabs * 16;  // of a deposit
    const int steps = deposits * kSteps, row_of_lane = lane / 8;
    const bool gated = p.activation.gated;
    const int width = gated ? 2 * p.columns : p.columns, distance = gated ? up_distance(p.block) : 0;
    const int token = tile.tokens_start + tile.row, first_column = tile.column * K::kTileN + lane % 8 * 8;
    const T* pre = static_cast<const T*>(p.pre) + static_cast<size_t>(token) * width;
    T* dpre = static_cast<T*>(p.dpre) + static_cast<size_t>(token) * width;
    T* hidden = p.hidden ? static_cast<T*>(p.hidden) + static_cast<size_t>(token) * p.columns : nullptr;
    float* shares = p.shares ? p.shares + static_cast<size_t>(tile.column) * kSlabs * p.shape.tokens + token : nullptr;
    int gate_at[kSlabs];  // the gate's column in pre; negative where there is none
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      const int column = first_column + i * 64;
      gate_at[i] = column >= p.columns ? -1 : gated && p.block < p.columns ? gate_column(column, p.block) : column;
    }
    const auto offset_of = [&](int step) INLINE {  // of the gate in pre; negative where there is none
      const int slab = step % kSteps / 16, row = step / kSteps * 64 + step % 16 * 4 + row_of_lane;
      int column = gate_at[0];
#pragma unroll
      for (int i = 1; i < kSlabs; ++i) column = slab == i ? gate_at[i] : column;
      return column >= 0 && row < tile.rows ? row * width + column : -1;
    };
    Octet ahead{uint4{}, ones<T>()};
    int offset = offset_of(warp);
    const auto load = [&](int at) INLINE {
      if (at < 0) return;
      ahead.gate = __ldcs(reinterpret_cast<const uint4*>(pre + at));
      if (gated) ahead.up = __ldcs(reinterpret_cast<const uint4*>(pre + at + distance));
    };
    load(offset);
    const RowScales<K::kTileM> scales(p.scales, token, tile.rows, lane);
    int deposit = -1;
#pragma unroll 1
    for (int step = warp; step < steps; step += kFinishers) {
      Octet x = ahead;
      const int consumer = step / kSteps, slab = step % kSteps / 16, first_row = step % 16 * 4, row = consumer * 64 + first_row + row_of_lane;
      const int here = offset;
      offset = step + kFinishers < steps ? offset_of(step + kFinishers) : -1;
      load(offset);
      if (consumer != deposit) {
        if (deposit >= 0) barrier_arrive(&s.collected[deposit][0]);
        deposit = consumer;
        barrier_wait(&s.deposited[deposit][0], phases >> deposit & 1);
      }
      uint4 grad = *reinterpret_cast<const uint4*>(s.deposits[deposit] + slab_offset(first_row + row_of_lane, slab * 8 + lane % 8));
      const float scale = scales.of(consumer * 64 + first_row, lane);
      last.settle(lane);
      if constexpr (kNarrow) separate(x.gate, x.up, p.block);
      last.value = octet<T>(kind, p.activation, x.gate, x.up, grad, scale);
      if constexpr (kNarrow) join(x.gate, x.up, p.block);
      if (here < 0) last.value = 0.f;
      last.to = shares && row < tile.rows ? shares + static_cast<size_t>(slab) * p.shape.tokens + row : nullptr;
      if (here >= 0) {
        *reinterpret_cast<uint4*>(dpre + here) = x.gate;
        if (gated) *reinterpret_cast<uint4*>(dpre + here + distance) = x.up;
        if (hidden) *reinterpret_cast<uint4*>(hidden + row * p.columns + first_column + slab * 64) = grad;
      }
    }
    barrier_arrive(&s.collected[deposit][0]);
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
