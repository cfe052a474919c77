// SPDX-License-Identifier: Apache-2.0
// The epilogue of a product alone: one thread for each consumer copies its output stages to where they belong. And the
// loop that it shares with the epilogue of ragged groups.
#pragma once
#include "device/epilogue/epilogue.cuh"

namespace fusible {

// Stores all tiles of a consumer, part by part; called by one thread, or by a warp of which one lane `issues` the
// copies. The buffer of a part is released once it has been read, or while the next part is copied if two fit.
// start_tile(to, tile) says whether a tile is stored by TMA. If not, store_no_tma(to, tile, from, first row, part)
// stores it.
template <class K, class To, class StartTile, class StoreNoTma>
DEVICE void store_parts(typename K::Storage& s, const GemmParams& p, int consumer, bool issues, To to,
                        StartTile start_tile, StoreNoTma store_no_tma) {
  using Layout = typename K::Layout;
  constexpr int kBehind = Layout::kSlots > 1 ? 1 : 0;
  WorkTileReader tiles(s.work);
  PipelineState<Layout::kSlots> slot, read;
  const auto give_back = [&] {
    barrier_arrive(&s.out_empty[consumer][read.stage]);
    read.advance();
  };
  for (WorkTile tile; tiles.next(tile);) {
    const bool by_tma = start_tile(to, tile);
    const int parts = K::stored_blocks(tile, consumer) * Layout::kParts;
    const int end = tile.row + tile.rows;
    to.column = K::smem_out_column(tile, consumer) * K::kSmemOutColumns;
    for (int part = 0; part < parts; ++part) {
      const int first = K::first_row(consumer, part / Layout::kParts), row = tile.row + first;
      to.map_row[0] = K::kRaggedDepth ? row : p.shape.tokens - end + row;
      to.map_row[1] = K::kRaggedDepth ? tile.coordinate.near : tile.tokens_start + end;
      to.map_row[2] = K::kRaggedDepth ? tile.coordinate.far : 0;
      barrier_wait(&s.out_full[consumer][slot.stage], slot.phase);
      const uint8_t* from = s.smem_out[consumer] + slot.stage * Layout::kPartBytes;
      if (by_tma && issues) store_part<Layout>(to, from, part % Layout::kParts);
      if (!by_tma) store_no_tma(to, tile, from, first, part % Layout::kParts);
      slot.advance();
      if (by_tma && issues) tma::wait_read<kBehind>();
      if (!by_tma || part >= kBehind) give_back();
    }
    if (kBehind && by_tma && parts > 0) {
      if (issues) tma::wait_read<0>();
      give_back();
    }
  }
  if (issues) tma::wait_all();
}

struct StoreEpilogue {
  using Params = GemmParams;
  static constexpr int kStoreWarps = 0, kRegisters = 72;
  struct Scratch {};
  template <class K>
  DEVICE static void store_tiles(typename K::Storage& s, const typename K::Params& p, int consumer, int) {
    if (K::kFetchesOld && p.accumulate) store_sums<K>(s, p, consumer);
    else store<K>(s, p, consumer);
  }

 private:
  template <class K>
  DEVICE static void store(typename K::Storage& s, const typename K::Params& p, int consumer) {
    const Destination to{.map = &p.out, .policy = tma::policy_evict_first(), .accumulate = p.accumulate};
    store_parts<K>(
        s, p, consumer, true, to, [](Destination&, const WorkTile&) INLINE { return true; },
        [](const Destination&, const WorkTile&, const uint8_t*, int, int) INLINE {});
  }

  // The same for sums: the buffer is given back with the old values of the next tile's first parts.
  template <class K>
  DEVICE static void store_sums(typename K::Storage& s, const typename K::Params& p, int consumer) {
    using Layout = typename K::Layout;
    WorkTileReader tiles(s.work);
    PipelineState<Layout::kSlots> slot;
    Destination to{.map = &p.out, .policy = tma::policy_evict_first()};
    const auto set_row = [&](const WorkTile& tile, int part) {
      to.map_row[0] = tile.row + K::first_row(consumer, part / Layout::kParts);
    };
    for (WorkTile tile; tiles.next(tile);) {
      const int parts = K::stored_blocks(tile, consumer) * Layout::kParts, first = slot.stage;
      const auto room = [&](int part) { return (first + part) % Layout::kSlots; };
      to.column = tile.column * K::kTileN;
      to.map_row[1] = tile.coordinate.near, to.map_row[2] = tile.coordinate.far;
      for (int part = 0; part < min(parts, Layout::kSlots); ++part) {
        set_row(tile, part);
        load_part<Layout>(to, s.smem_out[consumer] + room(part) * Layout::kPartBytes, part % Layout::kParts,
                          &s.out_empty[consumer][room(part)]);
      }
      for (int part = 0; part < parts; ++part) {
        set_row(tile, part);
        to.accumulate = part >= Layout::kSlots && !p.fetch_all;
        barrier_wait(&s.out_full[consumer][slot.stage], slot.phase);
        store_part<Layout>(to, s.smem_out[consumer] + slot.stage * Layout::kPartBytes, part % Layout::kParts);
        slot.advance();
        tma::wait_read<1>();
        if (part == 0 || part - 1 + Layout::kSlots >= parts) continue;
        const int read = room(part - 1), next = part - 1 + Layout::kSlots;
        set_row(tile, next);
        if (p.fetch_all)
          load_part<Layout>(to, s.smem_out[consumer] + read * Layout::kPartBytes, next % Layout::kParts,
                            &s.out_empty[consumer][read]);
        else barrier_arrive(&s.out_empty[consumer][read]);
      }
      tma::wait_read<0>();
    }
    tma::wait_all();
  }
};

// The same, of tiles that have as many columns of either half of a row.
struct HalvesStoreEpilogue : StoreEpilogue {
  template <class K>
  DEVICE static void store_tiles(typename K::Storage& s, const typename K::Params& p, int consumer, int) {
    store_parts<K>(
        s, p, consumer, true, HalvesDestination{{.map = &p.out, .policy = tma::policy_evict_first()}},
        [](Destination&, const WorkTile&) INLINE { return true; },
        [](const Destination&, const WorkTile&, const uint8_t*, int, int) INLINE {});
  }
};

}  // namespace fusible
