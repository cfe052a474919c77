// SPDX-License-Identifier: Apache-2.0
// The epilogue of groups of any shapes: an output stage goes out through the group's own map, or, where it has none, by
// ordinary stores.
#pragma once
#include "device/epilogue/epilogue_store.cuh"
#include "device/gemm/ragged_groups.cuh"
#include "device/ptx/map_update.cuh"

namespace fusible {

// A whole warp for each consumer.
struct RaggedEpilogue {
  using Params = RaggedParams;
  static constexpr int kStoreWarps = 1,
                       kRegisters = 152;  // for eight loads of each lane on their way (cp_async_copy.cuh)
  struct Scratch {};

  template <class K>
  DEVICE static void store_tiles(typename K::Storage& s, const Params& p, int consumer, int) {
    using Layout = typename K::Layout;
    const int lane = threadIdx.x % 32;
    const auto start_tile = [&](Destination& to, const WorkTile& tile) INLINE {
      const bool by_tma = !(s.groups.no_tma_of(tile.group) & kNoTmaOut);
      const CUtensorMap* map = p.maps + tile.group * 3 + 2;
      if (lane == 0 && by_tma && map != to.map) map_update::acquire(map);
      to.map = by_tma ? map : nullptr;
      return by_tma;
    };
    const auto store_part_values = [&](const Destination& to, const WorkTile& tile, const uint8_t* from, int first,
                                       int part) INLINE {
      const int column = to.column + part * (Layout::kSubtilesPerPart * Layout::kSubtileColumns);
      store_no_tma<K>(p, p.groups[tile.group], from, tile.row + first, min(64, tile.rows - first), column, lane);
    };
    const Destination to{.policy = tma::policy_evict_first(), .accumulate = p.accumulate};
    store_parts<K>(s, p, consumer, lane == 0, to, start_tile, store_part_values);
  }

 private:
  // One part of an output stage: a row of a subtile, 128 bytes, is four bytes for every lane.
  template <class K>
  DEVICE static void store_no_tma(const Params& p, const RaggedGroup& g, const uint8_t* from, int row, int rows,
                                  int column, int lane) {
    using Out = typename K::Out;
    constexpr int kSubtiles = K::Layout::kSubtilesPerPart, kColumns = K::Layout::kSubtileColumns,
                  kEach = 4 / sizeof(Out);
    auto* out = static_cast<Out*>(p.out_data) + g.out + static_cast<int64_t>(row) * g.n + column + lane * kEach;
    for (int i = 0; i < rows; ++i, out += g.n) {
#pragma unroll
      for (int subtile = 0; subtile < kSubtiles; ++subtile) {
        const uint32_t word =
            *reinterpret_cast<const uint32_t*>(from + subtile * kSubtileBytes + in_subtile(i, lane / 4) + lane % 4 * 4);
        store_values(out + subtile * kColumns, word, g.n - column - subtile * kColumns - lane * kEach, p.accumulate);
      }
    }
  }
  // As many values as there are, `count` at most.
  DEVICE static void store_values(float* to, uint32_t word, int count, bool accumulate) {
    if (count < 1) return;
    const float x = __uint_as_float(word);
    __stcg(to, accumulate ? __ldcg(to) + x : x);
  }
  template <class T>
  DEVICE static void store_values(T* to, uint32_t word, int count, bool accumulate) {
    auto* bits = reinterpret_cast<uint16_t*>(to);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= count) continue;
      const uint16_t mine = static_cast<uint16_t>(word >> i * 16);
      if (!accumulate) {
        __stcg(bits + i, mine);
        continue;
      }
      const float2 both = ptx::unpack<T>(static_cast<uint32_t>(__ldcg(bits + i)) << 16 | mine);
      __stcg(bits + i, static_cast<uint16_t>(ptx::pack<T>(both.x + both.y, 0.f)));
    }
  }
};

}  // namespace fusible
