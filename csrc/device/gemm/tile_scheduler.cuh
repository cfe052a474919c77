// SPDX-License-Identifier: Apache-2.0
// The choice of the next output tile of a block. Only this code knows how groups become tiles.
//
// The tokens of a group are consecutive rows of the token buffer. A group's output has rows (its own tokens, or the
// fixed number of rows of its weight gradient) and columns, both cut into tiles. Work is handed to clusters in tasks,
// numbered group after group (work_queue.cuh).
//
// A task of a block alone is a tile. A task of a cluster of 2 x 1 is a pair of tiles one above the other, which share
// B; an odd last row of tiles is done as pairs of tiles side by side, which share A. A task of a cluster of 1 x 2 is
// always such a pair: both blocks then have the same number of rows, which pays where groups are so small that most
// tiles are cut off at a group's end. Tiles of 256 rows share a group's blocks of 64 rows evenly, swap_ab ones its
// blocks of 16. Tasks are ordered by a raster swizzle: in strips of at most `raster_swizzle` rows of them, swept across
// the columns, so that the blocks running at one time share few rows of A and few columns of B in the L2 cache.
//
// Weight gradients of a few long groups are work for few rounds of tiles, the last of which may leave most of the GPU
// idle: if half the height makes that up, their tiles have half of it.
//
// Where few rounds of long tasks are all there is (`highest_first`), tasks are numbered by the height of the groups'
// tiles: what the last round waits for is then short. Where few groups have most of the tokens, all tiles are as high
// as one another, so that their order saves nothing: there they are cut lower if that fills the last round.
#pragma once
#include "device/gemm/groups.cuh"
#include "device/gemm/work_queue.cuh"

namespace fusible {

// The groups of the window as the producer reads them, in shared memory.
struct GroupTable {
  int start[kGroupsOfWindow], tokens[kGroupsOfWindow];
  int tasks_end[kGroupsOfWindow];  // tasks of this group and of all before it
  int lowered;                     // tiles are lower: halved if not 0; or by so many blocks
};

// The same for tasks that are numbered by position: the group at one is order[position].
struct SortedGroupTable : GroupTable {
  static constexpr int kMost = kMostSortedGroups;
  uint8_t order[kMost];
};

// The table of groups whose depth has slices.
struct SlicedGroupTable : SortedGroupTable {
  int slice_tokens;  // tokens of a slice; at least those of the longest group if no depth is split
};

// kRaggedRows: a group's output rows are its tokens; otherwise every group has `fixed_rows`.
template <TileVariant kVariant, bool kRaggedRows>
class TileScheduler {
  static constexpr int kTileM = kVariant.tile_m, kClusterM = kVariant.cluster_m, kClusterN = kVariant.cluster_n,
                       kCluster = kVariant.cluster();
  static constexpr int kBlock = kVariant.cut();  // rows that are not shared out among tiles
  static constexpr bool kSplits = kVariant.split_k;
  static constexpr bool kHalves = !kRaggedRows && kTileM > kLeastRows && !kSplits;
  static constexpr bool kSorts = kVariant.highest_first || kSplits;
  static constexpr bool kLowers = kVariant.highest_first;

 public:
  using Table = std::conditional_t<kSplits, SlicedGroupTable, std::conditional_t<kSorts, SortedGroupTable, GroupTable>>;
  // Fills the table. Called by one warp, once. Sizes are clamped to the buffer, so invalid ones cannot lead a kernel
  // outside of it.
  DEVICE static void fill(Table& table, const WorkShape& shape, int lane) {
    const SplitSizes& sizes = shape.sizes;
    const auto [first, count] = shape.window;
    // All at once: the rounds below wait for one another.
    for (int i = lane * 128; i < (first + count) * (sizes.int64_sizes ? 8 : 4); i += 32 * 128)
      ptx::prefetch(static_cast<const char*>(sizes.sizes) + i);
    int tokens_before = rows_before_window(sizes, shape.window, shape.tokens, lane), tasks_before = 0, longest = 0;
    float total = 0.f;
    for (int base = 0; base < count; base += 32) {
      const int at = base + lane;
      const GroupRows<int> rows = rows_of_lane(sizes, first + at, shape.tokens, tokens_before, lane);
      const auto [start, size, cut] = rows;
      if (blockIdx.x == 0) report_cut(sizes, first + at, rows, lane);
      if (at < count) table.start[at] = start, table.tokens[at] = size;
      longest = max(longest, size), total += static_cast<float>(size);
      if constexpr (!kHalves && !kSorts) number(table, shape, at, size, tasks_before, lane);
    }
    if constexpr (kSplits || kHalves || kLowers)
      for (int offset = 16; offset > 0; offset /= 2) {
        longest = max(longest, __shfl_xor_sync(~0u, longest, offset));
        total += __shfl_xor_sync(~0u, total, offset);
      }
    if constexpr (kSplits) {
      const int tokens = slice_tokens(table, longest, total, shape, lane);
      if (lane == 0) table.slice_tokens = tokens;
      __syncwarp();
    }
    if constexpr (kHalves || kLowers) {
      const float groups = total / static_cast<float>(max(1, longest));
      const int lowered = kHalves ? halving_pays(groups, shape) : lowering(groups, longest, shape);
      if (lane == 0) table.lowered = lowered;
      __syncwarp();
    }
    if constexpr (kSorts) {
      sort(table, count, lane);
      for (int base = 0; base < count; base += 32) {
        const int position = base + lane;
        const int size = position < count ? table.tokens[group_at(table, shape, position)] : 0;
        number(table, shape, position, size, tasks_before, lane);
      }
    }
    if constexpr (kHalves) {
      for (int base = 0; base < count; base += 32) {
        const int at = base + lane;
        number(table, shape, at, at < count ? table.tokens[at] : 0, tasks_before, lane);
      }
    }
  }

  // Constructed by the producer's thread.
  DEVICE TileScheduler(const Table& table, WorkQueue& queue, const WorkShape& shape, int rank)
      : table_(table), shape_(shape), rank_(rank), tasks_(queue, shape.counter, rank) {}

  // Makes the task after this one known; once per tile, before the next one is asked for.
  DEVICE void request() { tasks_.request(); }

  // False when all tasks are done. The other roles of the block read the same tiles (WorkTileReader).
  DEVICE bool next(WorkTile& tile) {
    if (position_ >= 0) tasks_.advance();
    const bool has_task = find(tile);
    if (!has_task) tile.group = -1;
    tasks_.publish(tile);
    return has_task;
  }

 private:
  DEVICE static int rows(int tokens, const WorkShape& shape) {
    if constexpr (kRaggedRows) return tokens;
    else return shape.skip_empty && tokens == 0 ? 0 : shape.fixed_rows;
  }
  // Groups with higher tiles, or more slices, before others, those that have as many in their order: by counting.
  DEVICE static void sort(Table& table, int groups, int lane) {
    if (groups > SortedGroupTable::kMost) return;
    const auto rank = [&](int tokens) {
      if constexpr (kSplits) return slices_of(tokens, table.slice_tokens);
      else return height_of(tokens, table.lowered);
    };
    int before = 0;
    for (int at = kSplits ? kMostSlices : kTileM / kBlock; at >= 0; --at)
      for (int base = 0; base < groups; base += 32) {
        const int group = base + lane;
        const bool here = group < groups && rank(table.tokens[group]) == at;
        const unsigned all = __ballot_sync(~0u, here);
        if (here) table.order[before + __popc(all & ((1u << lane) - 1))] = static_cast<uint8_t>(group);
        before += __popc(all);
      }
    __syncwarp();
  }
  // Blocks of the highest tile of a group.
  DEVICE static int height_of(int rows, int lowered) {
    const int blocks = (rows + kBlock - 1) / kBlock, tiles = max(1, tiles_of(rows, lowered));
    return (blocks + tiles - 1) / tiles;
  }
  DEVICE static int group_at(const Table& table, const WorkShape& shape, int position) {
    if constexpr (kSorts)
      if (shape.window.count <= SortedGroupTable::kMost) return table.order[position];
    return position;
  }
  // Numbers the tasks of 32 positions, one per lane.
  DEVICE static void number(Table& table, const WorkShape& shape, int at, int tokens, int& tasks_before, int lane) {
    const bool exists = at < shape.window.count;
    int tasks = exists ? tasks_of(tokens, shape, table.lowered) : 0;
    if constexpr (kSplits) tasks *= slices_of(tokens, table.slice_tokens);
    const int end = tasks_before + scan(tasks, lane);
    tasks_before = __shfl_sync(~0u, end, 31);
    if (exists) table.tasks_end[at] = end;
  }
  DEVICE static int slices_of(int tokens, int slice_tokens) {
    return max(1, (tokens + slice_tokens - 1) / max(1, slice_tokens));
  }
  // The work equals that of total / longest groups of the longest's length. A slice costs as much as kTokensOfSums
  // tokens, as its sums are written and read.
  DEVICE static int slice_tokens(const Table& table, int longest, float total, const WorkShape& shape, int lane) {
    constexpr float kTokensOfSums = 330.f;
    const int tasks = tasks_of(1, shape, 0);
    const float groups = total / static_cast<float>(max(1, longest));
    const auto cost = [&](int slices) {
      const float rounds = ceilf(groups * static_cast<float>(tasks * slices) / static_cast<float>(gridDim.x) - 0.1f);
      return rounds * static_cast<float>(longest) / static_cast<float>(slices) +
             (slices > 1 ? kTokensOfSums * static_cast<float>(slices) : 0.f);
    };
    int best = max(1, longest);
    float least = cost(1);
    if (!shape.may_split || shape.window.count > SortedGroupTable::kMost) return best;
    for (int slices = 2; slices <= kMostSlices; ++slices) {
      const int tokens = ((longest + slices - 1) / slices + 63) / 64 * 64;
      int sliced = 0;  // of all groups
      for (int at = lane; at < shape.window.count; at += 32)
        if (table.tokens[at] > tokens) sliced += slices_of(table.tokens[at], tokens);
      if (__shfl_sync(~0u, scan(sliced, lane), 31) * tasks <= kMostSlicedTasks && cost(slices) < least)
        best = tokens, least = cost(slices);
    }
    return best;
  }
  // The work equals that of `groups` groups of the longest's length. A tile of half the height needs 65 % of the time
  // of a full one (55 to 68 % were measured); a tenth of a round of short ones fits beside the others.
  DEVICE static bool halving_pays(float groups, const WorkShape& shape) {
    if (!shape.may_halve) return false;
    const float whole = rounds(groups, shape.fixed_rows, 0, shape);
    return whole < 4.f && rounds(groups, shape.fixed_rows, 1, shape) * 0.65f < whole;
  }
  // The number of blocks by which to lower tiles for the fewest rounds, for `groups` groups of the longest's length; 0
  // for more than a few groups.
  DEVICE static int lowering(float groups, int longest, const WorkShape& shape) {
    constexpr float kFew = 4.f;
    if (groups > kFew) return 0;
    const auto cost = [&](int lowered) {
      return rounds(groups, longest, lowered, shape) * static_cast<float>(height_of(longest, lowered));
    };
    int best = 0;
    float least = cost(best);
    for (int lowered = 1; kTileM - lowered * kBlock >= kLeastRows; ++lowered)
      if (const float lower = cost(lowered); lower < least) best = lowered, least = lower;
    return best;
  }
  // The rounds of the tiles of `groups` groups with `rows` rows each.
  DEVICE static float rounds(float groups, int rows, int lowered, const WorkShape& shape) {
    const auto tasks = static_cast<float>(tiles_of(rows, lowered) * column_tasks(shape)) / kClusterM;
    return ceilf(groups * tasks / static_cast<float>(gridDim.x / kCluster) - 0.1f);
  }
  // `lowered` counts where the sizes of the groups decide about it.
  DEVICE static int tiles_of(int rows, int lowered) {
    if (kHalves && lowered) return (rows + kLeastRows - 1) / kLeastRows;
    const int tile_rows = kLowers ? kTileM - lowered * kBlock : kTileM;
    return (rows + tile_rows - 1) / tile_rows;
  }
  DEVICE static int column_tasks(const WorkShape& shape) { return (shape.columns + kClusterN - 1) / kClusterN; }
  DEVICE static int tasks_of(int tokens, const WorkShape& shape, int lowered) {
    const int tiles = tiles_of(rows(tokens, shape), lowered);
    return tiles / kClusterM * column_tasks(shape) + (tiles % kClusterM ? (shape.columns + 1) / 2 : 0);
  }
  DEVICE bool find(WorkTile& tile) {
    const int task = tasks_.task();
    if (position_ < 0 || task >= table_.tasks_end[position_]) {
      position_ = next_position(task);
      if (position_ >= shape_.window.count) return false;
      first_task_ = position_ > 0 ? table_.tasks_end[position_ - 1] : 0;
    }
    const int at = group_at(table_, shape_, position_), group = shape_.window.first + at;
    tile.group = group;
    tile.tokens_start = table_.start[at];
    tile.tokens = table_.tokens[at];
    tile.coordinate = shape_.coordinates ? shape_.coordinates[group] : GroupCoordinate{group - shape_.first_group, 0};
    int local = task - first_task_;
    if constexpr (kSplits) local = take_slice(tile, local);
    locate(tile, local, rows(table_.tokens[at], shape_));
    return true;
  }
  // Slice after slice of all tiles of a group. Returns the task's number within its slice.
  DEVICE int take_slice(WorkTile& tile, int local) const {
    const int tasks = tasks_of(tile.tokens, shape_, 0);
    const int slice = local / tasks, within = local - slice * tasks, first = slice * table_.slice_tokens;
    tile.slice = Slice(slice, slices_of(tile.tokens, table_.slice_tokens), first_task_ + within, tasks);
    tile.tokens_start += first;
    tile.tokens = min(table_.slice_tokens, tile.tokens - first);
    return within;
  }
  // The position of the first group after this one that a task may belong to. Steps double, then halve, since few rows
  // leave most groups empty.
  DEVICE int next_position(int task) const {
    int before = position_, step = 1;  // `before` and all groups up to it end before the task
    const auto ends_before = [&](int at) { return at < shape_.window.count && table_.tasks_end[at] <= task; };
    for (; ends_before(before + step); step *= 2) before += step;
    for (; step > 1;) {
      step /= 2;
      if (ends_before(before + step)) before += step;
    }
    return before + 1;
  }
  // Row and column of a group's task number `local`.
  DEVICE void locate(WorkTile& tile, unsigned local, int rows) const {
    const unsigned tiles = tiles_of(rows, table_.lowered), pairs = tiles / kClusterM, columns = column_tasks(shape_);
    const unsigned strips = max(1u, (pairs + kVariant.raster_swizzle - 1) / kVariant.raster_swizzle),
                   usual = (pairs + strips - 1) / strips;  // height of a strip
    const unsigned strip = min(local / max(1u, usual * columns), strips - 1), within = local - strip * usual * columns;
    const bool last = strip == strips - 1;
    const unsigned height = last ? pairs - strip * usual : usual;
    unsigned pair, column;
    bool odd = false;
    if (last && tiles % kClusterM != 0) {  // two columns at a time: their pairs, then the odd row of tiles at both
      const unsigned two = within / (2 * height + 1), at = within - two * (2 * height + 1);
      odd = at >= height * min(2u, columns - 2 * two);
      const unsigned second = height && at >= height;  // of the two columns
      pair = odd ? pairs : strip * usual + at - second * height;
      column = 2 * two + (odd ? rank_ : second);
    } else {
      const unsigned across = within / height;
      pair = strip * usual + within - across * height;
      column = across * kClusterN + (kClusterN == 2 ? rank_ : 0);
    }
    cut(tile, pair * kClusterM + (odd || kClusterM == 1 ? 0 : rank_), tiles, rows);
    tile.column = column;
    tile.share_a = odd || kClusterN == 2;
    tile.idle = tile.rows == 0 || tile.column >= shape_.columns;
  }

  // The rows of a group's tile number `index` of `tiles`. High and swap_ab tiles differ by at most one block: a low
  // rest would fetch as many columns of B as a high tile for little work.
  DEVICE static void cut(WorkTile& tile, unsigned index, unsigned tiles, int rows) {
    if constexpr (kVariant.swap_ab || (kTileM > 128 && kClusterM == 1)) {
      const unsigned blocks = (rows + kBlock - 1) / kBlock, least = blocks / tiles, higher = blocks - least * tiles;
      tile.row = (index * least + min(index, higher)) * kBlock;
      tile.rows = min(rows - tile.row, static_cast<int>(least + (index < higher)) * kBlock);
    } else {
      tile.row = index * kTileM;
      tile.rows = max(0, min(kTileM, rows - tile.row));
    }
  }

  const Table& table_;
  const WorkShape& shape_;
  int rank_;
  WorkTileWriter<kCluster> tasks_;
  int position_ = -1, first_task_ = 0;  // of the group in the window, or in the order
};

}  // namespace fusible
