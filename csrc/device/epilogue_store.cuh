// SPDX-License-Identifier: Apache-2.0
// The epilogue of a product alone: one thread for each consumer copies its output stages to where they belong.
#pragma once
#include "device/epilogue.cuh"

namespace fusible {

struct StoreEpilogue {
  using Params = GemmParams;
  static constexpr int kFinishers = 0, kRegisters = 72;
  struct Scratch {};
  template <class K>
  DEVICE static void finish(typename K::Storage& s, const Params& p, int consumer, int) {
    if (K::kFetchesOld && p.accumulate) store_sums<K>(s, p, consumer);
    else store<K>(s, p, consumer);
  }

 private:
  // One thread for each consumer. A part's room is given back once it has been read: while the next part is being
  // copied, if there is room for two.
  template <class K>
  DEVICE static void store(typename K::Storage& s, const Params& p, int consumer) {
    using Layout = typename K::Layout;
    constexpr int kBehind = Layout::kSlots > 1 ? 1 : 0;
    TileReader tiles(s.tasks);
    PipelineState<Layout::kSlots> slot, read;
    Destination to{.map = &p.out, .policy = tma::policy_evict_first(), .accumulate = p.accumulate};
    const auto give_back = [&] {
      barrier_arrive(&s.out_empty[consumer][read.stage]);
      read.advance();
    };
    for (Tile tile; tiles.next(tile);) {
      const int parts = K::row_blocks(tile, consumer) * Layout::kParts;
      const int end = tile.row + tile.rows;
      to.column = K::smem_out_column(tile, consumer) * K::kSmemOutColumns;
      for (int part = 0; part < parts; ++part) {
        const int row = tile.row + K::first_row(consumer, part / Layout::kParts);
        to.map_row[0] = K::kRaggedDepth ? row : p.shape.tokens - end + row;
        to.map_row[1] = K::kRaggedDepth ? tile.coordinate.near : tile.tokens_start + end;
        to.map_row[2] = K::kRaggedDepth ? tile.coordinate.far : 0;
        barrier_wait(&s.out_full[consumer][slot.stage], slot.phase);
        store_part<Layout>(to, s.smem_out[consumer] + slot.stage * Layout::kPartBytes, part % Layout::kParts);
        slot.advance();
        tma::wait_read<kBehind>();
        if (part >= kBehind) give_back();
      }
      if (kBehind && parts > 0) {
        tma::wait_read<0>();
        give_back();
      }
    }
    tma::wait_all();
  }

  // The same, for sums: the room is not given back empty, but with what stands at the place of the next tile's first
  // parts.
  template <class K>
  DEVICE static void store_sums(typename K::Storage& s, const Params& p, int consumer) {
    using Layout = typename K::Layout;
    TileReader tiles(s.tasks);
    PipelineState<Layout::kSlots> slot;
    Destination to{.map = &p.out, .policy = tma::policy_evict_first()};
    const auto place = [&](const Tile& tile, int part) {
      to.map_row[0] = tile.row + K::first_row(consumer, part / Layout::kParts);
    };
    for (Tile tile; tiles.next(tile);) {
      const int parts = K::row_blocks(tile, consumer) *
                        Layout::kParts;  // a multiple of the slots: every tile begins with the first of them
      to.column = tile.column * K::kTileN;
      to.map_row[1] = tile.coordinate.near, to.map_row[2] = tile.coordinate.far;
      for (int part = 0; part < min(parts, Layout::kSlots); ++part) {
        place(tile, part);
        load_part<Layout>(to, s.smem_out[consumer] + part * Layout::kPartBytes, part % Layout::kParts,
                          &s.out_empty[consumer][part]);
      }
      for (int part = 0; part < parts; ++part) {
        place(tile, part);
        to.accumulate = part >= Layout::kSlots && !p.fetch_all;
        barrier_wait(&s.out_full[consumer][slot.stage], slot.phase);
        store_part<Layout>(to, s.smem_out[consumer] + slot.stage * Layout::kPartBytes, part % Layout::kParts);
        slot.advance();
        tma::wait_read<1>();
        if (part == 0 || part - 1 + Layout::kSlots >= parts) continue;
        const int read = (part - 1) % Layout::kSlots, next = part - 1 + Layout::kSlots;
        place(tile, next);
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

}  // namespace fusible
