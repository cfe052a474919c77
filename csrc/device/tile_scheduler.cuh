// Which output tile a block computes next. The only code that knows how groups become tiles.
//
// The tokens of a group are consecutive rows of the token buffer. A group's output has rows (its own tokens, or the fixed number
// of rows of its weight gradient) and columns, both cut into tiles. Work is handed to clusters in tasks, numbered group after group
// (task_queue.cuh).
//
// A task of a block alone is a tile. A task of a cluster of 2 x 1 is a pair of tiles one above the other, which share B; an odd last
// row of tiles is done as pairs of tiles side by side, which share A. A task of a cluster of 1 x 2 is always such a pair: both
// blocks then have the same number of rows, which pays where groups are so small that most tiles are cut off at a group's end.
// Tasks are ordered in bands of at most `band` rows of them, swept across the columns, so that the blocks running at one time
// share few rows of A and few columns of B in the L2 cache.
#pragma once
#include "device/task_queue.cuh"
#include "kernels/kernel_entry.h"

namespace fusible {

constexpr int kMaxGroups = 512;

DEVICE long long read_index(const GroupSource& source, const void* array, int i) {
  return source.wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}

// The groups as every role of a block reads them, in shared memory.
struct GroupTable {
  int start[kMaxGroups], tokens[kMaxGroups];
  int tasks_end[kMaxGroups];  // tasks of this group and of all before it
};

struct Tile {
  int group, tokens_start, tokens;  // the group, its first token in the buffer, its number of tokens
  Place place;                      // of the group's matrix
  int row, rows;                    // the tile's first output row, counted within the group, and how many of its rows exist
  int column;                       // index of the column tile
  bool share_a;                     // both blocks of the cluster have these rows, and each its own column
  bool idle;                        // nothing to compute here: this block only helps the other one to its half of A
};

DEVICE int clamp(long long x, int low, int high) { return static_cast<int>(x < low ? low : x > high ? high : x); }
DEVICE int scan(int x, int lane) {  // inclusive prefix sum over the warp
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(~0u, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

// kRaggedRows: a group's output rows are its tokens; otherwise every group has `fixed_rows`.
template <TileVariant kVariant, bool kRaggedRows>
class TileScheduler {
  static constexpr int kTileM = kVariant.tile_m, kClusterM = kVariant.cluster_m, kClusterN = kVariant.cluster_n, kCluster = kVariant.cluster();

 public:
  // By one warp, once. Starts and sizes are clamped to the buffer, so that no content of theirs can lead a kernel outside.
  DEVICE static void fill(GroupTable& table, const GroupSource& source, const TaskShape& shape, int lane) {
    int tokens_before = 0, tasks_before = 0;
    for (int base = 0; base < shape.groups; base += 32) {
      const int group = base + lane;
      const bool exists = group < shape.groups;
      int start = 0, size = 0;
      if (exists && source.starts) {
        const long long first = read_index(source, source.starts, group);
        start = clamp(first, 0, shape.tokens);
        const long long wanted = source.sizes ? read_index(source, source.sizes, group) : read_index(source, source.starts, group + 1) - first;
        size = clamp(wanted, 0, shape.tokens - start);
      } else if (!source.starts) {
        if (exists) size = clamp(read_index(source, source.sizes, group), 0, shape.tokens);
        for (int offset = 1; offset < 32; offset *= 2) {  // a scan that saturates, so that it cannot overflow
          const int other = __shfl_up_sync(~0u, size, offset);
          if (lane >= offset) size = min(size, shape.tokens - other) + other;
        }
        const int end = tokens_before + min(size, shape.tokens - tokens_before);
        start = __shfl_up_sync(~0u, end, 1);
        if (lane == 0) start = tokens_before;
        size = end - start;
        tokens_before = __shfl_sync(~0u, end, 31);
      }
      const int end = tasks_before + scan(exists ? tasks_of(size, shape) : 0, lane);
      tasks_before = __shfl_sync(~0u, end, 31);
      if (exists) table.start[group] = start, table.tokens[group] = size, table.tasks_end[group] = end;
    }
  }

  // For a role of one thread, or of a whole warp.
  DEVICE TileScheduler(const GroupTable& table, TaskQueue& queue, const TaskShape& shape, int rank, bool whole_warp)
      : table_(table), shape_(shape), rank_(rank), taker_(queue, shape.counter != nullptr, whole_warp) {}

  // False when all tasks are done. Every role of a block walks the same sequence on its own.
  DEVICE bool next(Tile& tile) {
    if (group_ >= 0) taker_.advance();
    const int task = taker_.task();
    while (task >= tasks_end_) {
      if (++group_ >= shape_.groups) return false;
      first_task_ = tasks_end_;
      tasks_end_ = table_.tasks_end[group_];
    }
    tile.group = group_;
    tile.tokens_start = table_.start[group_];
    tile.tokens = table_.tokens[group_];
    tile.place = shape_.places ? shape_.places[group_] : Place{group_, 0};
    place(tile, task - first_task_, rows(tile.tokens, shape_));
    return true;
  }

 private:
  DEVICE static int rows(int tokens, const TaskShape& shape) {
    if constexpr (kRaggedRows) return tokens;
    else return shape.skip_empty && tokens == 0 ? 0 : shape.fixed_rows;
  }
  DEVICE static int column_tasks(const TaskShape& shape) { return (shape.columns + kClusterN - 1) / kClusterN; }
  DEVICE static int tasks_of(int tokens, const TaskShape& shape) {
    const int tiles = (rows(tokens, shape) + kTileM - 1) / kTileM;
    return tiles / kClusterM * column_tasks(shape) + (tiles % kClusterM ? (shape.columns + 1) / 2 : 0);
  }
  // Row and column of a group's task number `local`.
  DEVICE void place(Tile& tile, int local, int rows) const {
    const int tiles = (rows + kTileM - 1) / kTileM, pairs = tiles / kClusterM, columns = column_tasks(shape_);
    const int bands = max(1, (pairs + kVariant.band - 1) / kVariant.band), usual = (pairs + bands - 1) / bands;  // height of a band
    const int band = min(local / max(1, usual * columns), bands - 1), within = local - band * usual * columns;
    const bool last = band == bands - 1;
    const int height = last ? pairs - band * usual : usual;
    int pair, column;
    bool odd = false;
    if (last && tiles % kClusterM != 0) {  // two columns at a time: their pairs, then the odd row of tiles at both
      const int two = within / (2 * height + 1), at = within - two * (2 * height + 1);
      odd = at >= height * min(2, columns - 2 * two);
      pair = odd ? pairs : band * usual + at % max(1, height);
      column = 2 * two + (odd ? rank_ : at / max(1, height));
    } else {
      pair = band * usual + within % height;
      column = within / height * kClusterN + (kClusterN == 2 ? rank_ : 0);
    }
    tile.row = (pair * kClusterM + (odd || kClusterM == 1 ? 0 : rank_)) * kTileM;
    tile.rows = max(0, min(kTileM, rows - tile.row));
    tile.column = column;
    tile.share_a = odd || kClusterN == 2;
    tile.idle = tile.rows == 0 || column >= shape_.columns;
  }

  const GroupTable& table_;
  const TaskShape& shape_;
  int rank_;
  TaskTaker<kCluster> taker_;
  int group_ = -1, first_task_ = 0, tasks_end_ = 0;
};

}  // namespace fusible
