// SPDX-License-Identifier: Apache-2.0
// Groups that differ in rows, columns and depth: which tile comes next. The tiles of a group are numbered in strips, as
// in tile_scheduler.cuh, for blocks without a cluster.
#pragma once
#include "device/gemm/operands.cuh"
#include "kernels/ragged/ragged.h"

namespace fusible {

// The data of the window's groups that all roles of a block read, in shared memory.
struct RaggedTable {
  int m[kGroupsOfWindow], n[kGroupsOfWindow], k[kGroupsOfWindow], tasks_end[kGroupsOfWindow];
  uint8_t no_tma[kGroupsOfWindow];

  // The flag of a group of the window. All windows but the last have equally many groups.
  DEVICE int no_tma_of(int group) const { return no_tma[group % kGroupsOfWindow]; }
};

template <TileVariant kVariant>
class RaggedScheduler {
  static constexpr int kTileM = kVariant.tile_m, kTileN = kVariant.tile_n;

 public:
  // Fills the table from the results of `prepare_ragged`. Called by one warp, once.
  DEVICE static void fill(RaggedTable& table, const RaggedGroup* groups, const GroupWindow& window, int lane) {
    const RaggedGroup* const of_window = groups + window.first;
    const int tasks_before = window.first > 0 ? of_window[-1].tasks_end : 0;
    for (int at = lane; at < window.count; at += 32) {
      const RaggedGroup& group = of_window[at];
      table.m[at] = group.m, table.n[at] = group.n, table.k[at] = group.k;
      table.tasks_end[at] = group.tasks_end - tasks_before, table.no_tma[at] = static_cast<uint8_t>(group.no_tma);
    }
  }

  // One for each lane of the producer's warp; only lane 0 asks for tasks.
  DEVICE RaggedScheduler(const RaggedTable& table, WorkQueue& queue, const WorkShape& shape, int lane)
      : table_(table), window_(shape.window), tasks_(queue, shape.counter, lane) {}

  // Makes the task after this one known; once per tile, before the next one is asked for.
  DEVICE void request() { tasks_.request(); }

  // The next tile, of group -1 when all are done. The other roles of the block read the same tiles (WorkTileReader).
  DEVICE void next(WorkTile& tile) {
    if (position_ >= 0) tasks_.advance();
    if (!find(tile)) tile.group = -1;
    tasks_.publish(tile);
  }

 private:
  DEVICE bool find(WorkTile& tile) {
    const int task = tasks_.task();
    while (task >= tasks_end_) {
      if (++position_ >= window_.count) return false;
      first_task_ = tasks_end_;
      tasks_end_ = table_.tasks_end[position_];
    }
    tile = {.group = window_.first + position_,
            .tokens_start = 0,
            .tokens = table_.k[position_],
            .coordinate = {0, 0},
            .share_a = false,
            .idle = false};
    locate(tile, task - first_task_);
    return true;
  }
  // Row and column of a group's tile number `local`: strips of at most `raster_swizzle` rows of tiles, swept across the
  // columns.
  DEVICE void locate(WorkTile& tile, unsigned local) const {
    const int rows = table_.m[position_];
    const unsigned tiles = (rows + kTileM - 1) / kTileM, columns = (table_.n[position_] + kTileN - 1) / kTileN;
    const unsigned strips = (tiles + kVariant.raster_swizzle - 1) / kVariant.raster_swizzle,
                   usual = (tiles + strips - 1) / strips;
    const unsigned strip = min(local / (usual * columns), strips - 1), within = local - strip * usual * columns;
    const unsigned height = strip == strips - 1 ? tiles - strip * usual : usual, across = within / height;
    tile.row = (strip * usual + within - across * height) * kTileM;
    tile.rows = min(kTileM, rows - tile.row);
    tile.column = across;
  }

  const RaggedTable& table_;
  GroupWindow window_;
  WorkTileWriter<1> tasks_;
  int position_ = -1, first_task_ = 0, tasks_end_ = 0;
};

// ---- operands, through the maps of a group. Each group has its own depth, which is what a tile calls tokens
// (mainloop.cuh).

// A [m, k].
template <class T>
struct RaggedRows : TokenRows<T> {
  static constexpr bool kRaggedDepth = true;
};
// A [k, m].
template <class T>
struct RaggedColumns : MnMajor<T> {
  static constexpr bool kRaggedDepth = true;
  static constexpr int kRows = MnMajor<T>::kChunkColumns;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kBlockBytes, tile.row + i * kRows, k);
  }
};
// B are WeightRows and WeightColumns at place (0, 0).

}  // namespace fusible
