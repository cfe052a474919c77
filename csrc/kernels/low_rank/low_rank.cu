// SPDX-License-Identifier: Apache-2.0
// Each block takes as many tiles of 16 rows as every other, of one group after the other. One of its warps copies tiles
// to a ring of stages in shared memory. Eight multiply them, each its columns, and keep these columns of the factor,
// and of the gradient of the group at hand, in registers. Another copies gathered rows back to device memory, and
// another adds up the products of the eight. So no warp waits for the copies of others. The last of the blocks that
// share a group to reach its end adds up their parts of the gradient, in the order of the rows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "device/gemm/groups.cuh"
#include "device/ptx/barrier.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/signal.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/vector.cuh"
#include "device/ptx/warp_mma.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/low_rank.h"
#include "fusible/overlapping_launch.h"
#include "fusible/wrong_sizes.h"
#include "fusible/zeroing.h"

namespace fusible {
namespace {

constexpr int kRows = 16;                                               // of a tile
constexpr int kMultipliers = 8;                                         // warps
constexpr int kChunkColumns = 64;                                       // a warp has up to four times as many
constexpr int kThreads = (kMultipliers + 4) * 32, kSliceThreads = 256;  // and of the kernel that adds slices
constexpr int kMostStages = 8, kBuffers = 2;                            // of tiles; of products

// How columns and rows are divided. Ranks count in units of 16.
struct Division {
  int units, warps, slices, blocks, stages;  // column slices, one at a time per block
  int warp_columns, slice_columns;           // slice_columns: of all warps of a block
  int row_bytes, stage_bytes;                // in shared memory
  int64_t part_numbers;                      // of a gradient of all ranks of a slice
};

struct Params {
  LowRankPass call;
  Division division;
  unsigned* parts_there;    // of a gradient, by the block that has its first, and by warp
  float *parts, *products;  // of gradients, two for each block; of slices [slices, tokens, rank]
};

// Rows and tiles before each group, in dynamic shared memory.
struct GroupTable {
  int *first_row, *first_tile;  // [groups + 1]

  static int bytes(int groups) { return 2 * (groups + 1) * static_cast<int>(sizeof(int)); }
};

// Called by one warp.
DEVICE void find_groups(const SplitSizes& sizes, int tokens, const GroupTable& to) {
  const int lane = threadIdx.x % 32, size = sizes.int64_sizes ? 8 : 4;
  for (int group = lane * 128 / size; group < sizes.groups; group += 32 * 128 / size)
    ptx::prefetch(static_cast<const uint8_t*>(sizes.sizes) + group * size);
  int rows = 0, tiles = 0;
  for (int base = 0; base <= sizes.groups; base += 32) {
    const int group = base + lane;
    const GroupRows<int> found = rows_of_lane(sizes, group, tokens, rows, lane);
    report_cut(sizes, group, found, lane);
    const int of_group = (found.size + kRows - 1) / kRows, after = tiles + scan(of_group, lane);
    if (group <= sizes.groups) to.first_row[group] = found.start, to.first_tile[group] = after - of_group;
    tiles = __shfl_sync(~0u, after, 31);
  }
}

// Tasks are the tiles of all groups, one slice of the columns after another. Blocks, at most one per task, take them in
// order; the first blocks may have one more than the others.
struct Tasks {
  int count, blocks, share, longer;
  DEVICE Tasks(int tiles, const Division& division) : count(tiles * division.slices) {
    blocks = min(count, division.blocks);
    share = count / max(1, blocks), longer = count - share * blocks;
  }
  DEVICE int first(int block) const { return block < blocks ? block * share + min(block, longer) : count; }
  DEVICE int block_of(int task) const {
    const int of_longer = longer * (share + 1);
    return task < of_longer ? task / (share + 1) : longer + (task - of_longer) / share;
  }
};

struct RowTile {
  int group, slice, row, rows;
  bool begins, ends;          // the block's tiles of the group and slice
  bool has_start, has_whole;  // whether these are the first of the group; and all
};

// The tiles of a block, in order: the last group's first, if the block has its beginning. Blocks with about one group
// each, the end of one and the beginning of the next, then go through a group from beginning to end at the same time.
// Rows of a group are in the order of their tokens, so gathered rows stay in the cache.
struct Schedule : GroupTable {
  int groups, tiles, first, last, turn;  // `turn`: the task that the block begins with
  int step;                              // the first of a search: at least half of the groups, a power of two

  // Called by one warp; `room` is memory for the table.
  DEVICE void find(const Params& p, int* room) {
    const GroupTable table{room, room + p.call.sizes.groups + 1};
    find_groups(p.call.sizes, static_cast<int>(p.call.rows.tokens), table);
    __syncwarp();
    if (threadIdx.x % 32) return;
    first_row = table.first_row, first_tile = table.first_tile;
    groups = p.call.sizes.groups, tiles = first_tile[groups];
    for (step = 1; 2 * step < groups;) step *= 2;
    const Tasks tasks(tiles, p.division);
    first = turn = tasks.first(blockIdx.x), last = tasks.first(blockIdx.x + 1);
    if (count()) turn = max(first, start_of(group_of(last - 1), last - 1));
  }
  DEVICE int count() const { return last - first; }
  DEVICE int group_of(int task) const {
    const int tile = task % tiles;
    int group = 0;
    for (int on = step; on; on /= 2)  // the last group with no more tiles before it
      if (group + on < groups && first_tile[group + on] <= tile) group += on;
    return group;
  }
  // The first task of a group, in the slice of another task.
  DEVICE int start_of(int group, int task) const { return task / tiles * tiles + first_tile[group]; }

  DEVICE RowTile operator[](int i) const {
    if (i >= count()) return {};
    const int task = i < last - turn ? turn + i : i - (last - turn) + first;
    const int group = group_of(task), start = start_of(group, task), end = start_of(group + 1, task),
              row = first_row[group] + (task - start) * kRows;
    return {group,
            task / tiles,
            row,
            min(kRows, first_row[group + 1] - row),
            task == first || task == start,
            task + 1 == last || task + 1 == end,
            start >= first,
            start >= first && end <= last};
  }
};

// The contents of a stage: the rows of a tile or, before the first tile of a group, one of the parts of the group's
// factor, one per unit.
struct Arrival : RowTile {
  static constexpr int kRowsOfTile = -1;
  int part;
};

// The state shared by the warps of a block, besides the dynamic memory.
struct BlockState {
  Schedule schedule;
  RowTile upcoming[32], of_products[kBuffers];
  Arrival arrivals[kMostStages];
  const void* sources[kRows];  // of the rows of a tile
};

// Dynamic shared memory of a block, behind one another: barriers; stages of rows and, after these, their `low`;
// products by buffer and warp; room for gradients on their way out, by warp; the table of groups.
template <int kUnits>
struct BlockMemory {
  static constexpr int kColumns = 4 * kChunkColumns / kUnits, kRanks = 16 * kUnits;  // of a warp
  static constexpr int kPitch = kRanks + 4;  // of products: then no two lanes of a warp store to one bank
  static constexpr int kProductFloats = kRows * kPitch, kBarrierBytes = 256;
  static constexpr int kLine = 24, kShortLine = 12;  // of 16 ranks, and of 8 columns, of a gradient on its way out
  static constexpr int kScratchFloats = 192;
  static_assert((2 * kMostStages + 2 * kBuffers) * 8 <= kBarrierBytes);
  static_assert(8 * kLine <= kScratchFloats && 16 * kShortLine <= kScratchFloats);

  uint8_t* shared;
  int row_bytes, stage_bytes, stages, warps;

  // Bytes besides the stages.
  static int other_bytes(int warps) { return kBarrierBytes + warps * (kBuffers * kProductFloats + kScratchFloats) * 4; }
  DEVICE uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(shared) + stage; }
  DEVICE uint64_t* empty(int stage) const { return full(kMostStages + stage); }
  DEVICE uint64_t* products_full(int buffer) const { return full(2 * kMostStages + buffer); }
  DEVICE uint64_t* products_empty(int buffer) const { return products_full(kBuffers + buffer); }
  DEVICE uint8_t* rows(int stage) const { return shared + kBarrierBytes + stage * stage_bytes; }
  DEVICE uint8_t* low(int stage) const { return rows(stage) + kRows * row_bytes; }
  DEVICE float* products(int buffer, int warp) const {
    return reinterpret_cast<float*>(rows(stages)) + (buffer * warps + warp) * kProductFloats;
  }
  DEVICE float* scratch(int warp) const { return products(kBuffers, 0) + warp * kScratchFloats; }
  DEVICE int* groups() const { return reinterpret_cast<int*>(scratch(warps)); }

  // Called by one thread.
  DEVICE void init_barriers(bool gathered) const {
    for (int stage = 0; stage < stages; ++stage)
      barrier_init(full(stage), 1), barrier_init(empty(stage), warps + gathered);
    for (int buffer = 0; buffer < kBuffers; ++buffer)
      barrier_init(products_full(buffer), warps), barrier_init(products_empty(buffer), 1);
    barrier_init_fence();
  }
};

DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int warp() { return threadIdx.x / 32; }

// The position of a warp in a ring of slots, whose number the launch decides.
struct Ring {
  int slot = 0;
  uint32_t phase = 0;  // of a full slot; of an empty one, the other
  DEVICE void advance(int slots) {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

// The bytes of a row in a slice.
DEVICE uint32_t bytes_of(const Params& p, int slice) {
  const int width = p.division.slice_columns;
  return min(width, static_cast<int>(p.call.rows.columns) - slice * width) * 2;
}

// The slots of rows, asked for in order: those of 32 rows, one per lane, and the prefetched ones of the 32 after them.
struct Slots {
  const int32_t* slot_of_row;
  int tokens, first = INT32_MIN / 2, now = 0, next = 0;

  DEVICE int load(int from) const { return from + lane() < tokens ? slot_of_row[from + lane()] : 0; }
  // The slot of row `row` + lane, for this lane; rows are asked for in ascending order, 16 at a time.
  DEVICE int operator[](int row) {
    if (row < first || row >= first + 64) {
      first = row, now = load(row), next = load(row + 32);
    } else if (row >= first + 32) {
      first += 32, now = next, next = load(first + 32);
    }
    const int at = row - first + lane();
    int slot = __shfl_sync(~0u, now, at % 32);
    if (row - first + kRows > 32) {  // else they need not have come yet
      const int later = __shfl_sync(~0u, next, at % 32);
      if (at >= 32) slot = later;
    }
    return slot;
  }
};

// The warp that fills the stages.
template <class T, int kUnits, bool kProduct, bool kGradient>
struct Loader {
  const Params& p;
  const BlockMemory<kUnits> memory;
  BlockState& state;
  Ring ring;

  DEVICE void run() {
    Slots slots{p.call.slot_of_row, static_cast<int>(p.call.rows.tokens)};
    const int count = state.schedule.count();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i % 32 == 0) {
        __syncwarp();
        state.upcoming[lane()] = state.schedule[i + lane()];
        __syncwarp();
      }
      const RowTile tile = state.upcoming[i % 32];
      if (kProduct && tile.begins)
#pragma unroll 1
        for (int part = 0; part < kUnits; ++part) load_factor(tile, part);
      const int from = p.call.slot_of_row ? slots[tile.row] / p.call.top_k : tile.row + lane();
      load_rows(tile, from);
    }
    ptx::let_next_kernel_begin();
  }

  // Begins a stage of `bytes` bytes.
  DEVICE void begin_stage(const RowTile& tile, int part, uint32_t bytes) {
    if (ptx::elect_one()) {
      state.arrivals[ring.slot] = {tile, part};
      barrier_arrive_expecting(memory.full(ring.slot), bytes);
    }
    __syncwarp();
  }

  // `from`: the row that this lane's is copied from.
  DEVICE void load_rows(const RowTile& tile, int from) {
    const LowRankPass& c = p.call;
    barrier_wait(memory.empty(ring.slot), ring.phase ^ 1);
    const int low_bytes = kGradient ? static_cast<int>(c.rank) * 2 : 0;
    if (kGradient && tile.rows < kRows) {  // zeros for rows that do not exist
      for (int i = tile.rows * low_bytes + lane() * 16; i < kRows * low_bytes; i += 32 * 16)
        *reinterpret_cast<uint4*>(memory.low(ring.slot) + i) = {0, 0, 0, 0};
      ptx::async_proxy_fence();
      __syncwarp();
    }
    const T* const data = static_cast<const T*>(c.rows.data) + tile.slice * p.division.slice_columns;
    if (lane() < kRows) state.sources[lane()] = data + from * c.rows.pitch;
    const uint32_t row_bytes = bytes_of(p, tile.slice);
    begin_stage(tile, Arrival::kRowsOfTile, tile.rows * (row_bytes + low_bytes));
    if (ptx::elect_one()) {
      uint64_t* const barrier = memory.full(ring.slot);
      uint8_t* const to = memory.rows(ring.slot);
      if constexpr (kGradient)
        bulk::load(memory.low(ring.slot), static_cast<const T*>(c.low) + tile.row * c.rank, tile.rows * low_bytes,
                   barrier);
#pragma unroll 4
      for (int row = 0; row < tile.rows; ++row)
        bulk::load(to + row * memory.row_bytes, state.sources[row], row_bytes, barrier);
    }
    __syncwarp();
    ring.advance(memory.stages);
  }

  // [rank, columns]: 16 ranks. [columns, rank]: as many columns as have the bytes of a tile.
  DEVICE void load_factor(const RowTile& tile, int part) {
    const LowRankPass& c = p.call;
    const int rank = static_cast<int>(c.rank), columns = static_cast<int>(c.rows.columns);
    barrier_wait(memory.empty(ring.slot), ring.phase ^ 1);
    const T* from = static_cast<const T*>(c.factor) + tile.group * c.rank * c.rows.columns;
    const int row_bytes = static_cast<int>(bytes_of(p, tile.slice)), width = p.division.slice_columns / kUnits;
    const int lines = c.by_columns ? 1 : clamp_size(rank - part * 16, 16);
    const int bytes = c.by_columns ? clamp_size(row_bytes / 2 - part * width, width) * rank * 2 : row_bytes;
    begin_stage(tile, part, lines * bytes);
    const int first = tile.slice * p.division.slice_columns;
    from += c.by_columns ? (first + part * width) * rank : part * 16 * columns + first;
    if (bytes > 0 && ptx::elect_one())
#pragma unroll 1
      for (int line = 0; line < lines; ++line)
        bulk::load(memory.rows(ring.slot) + line * memory.row_bytes, from + line * columns, bytes,
                   memory.full(ring.slot));
    __syncwarp();
    ring.advance(memory.stages);
  }
};

// Stores gathered rows from the stages to device memory. Called by one thread.
template <int kUnits>
DEVICE void store_gathered(const Params& p, const BlockMemory<kUnits>& memory, const BlockState& state) {
  const LowRankPass& c = p.call;
  Ring ring;
#pragma unroll 1
  for (int count = state.schedule.count(); count;) {
    barrier_wait(memory.full(ring.slot), ring.phase);
    const Arrival& tile = state.arrivals[ring.slot];
    if (tile.part == Arrival::kRowsOfTile) {
      const int64_t pitch = c.rows.columns * 2;
      auto* const to = static_cast<uint8_t*>(c.gathered) + tile.row * pitch + tile.slice * p.division.slice_columns * 2;
      const uint8_t* const from = memory.rows(ring.slot);
#pragma unroll 1
      for (int row = 0; row < tile.rows; ++row)
        bulk::store(to + row * pitch, from + row * memory.row_bytes, bytes_of(p, tile.slice));
      tma::commit(), tma::wait_read<0>();
      --count;
    }
    barrier_arrive(memory.empty(ring.slot));
    ring.advance(memory.stages);
  }
  tma::wait_all();
}

// Adds the products of tiles over the warps, in their order. Called by a warp; a lane has eight ranks of a row at a
// time.
template <class T, int kUnits>
DEVICE void add_products(const Params& p, const BlockMemory<kUnits>& memory, const BlockState& state) {
  using Memory = BlockMemory<kUnits>;
  const LowRankPass& c = p.call;
  const int rank = static_cast<int>(c.rank), count = state.schedule.count();
  Ring ring;
#pragma unroll 1
  for (int done = 0; done < count; ++done) {
    barrier_wait(memory.products_full(ring.slot), ring.phase);
    const RowTile& tile = state.of_products[ring.slot];
#pragma unroll 1
    for (int i = lane(); i < kRows * Memory::kRanks / 8; i += 32) {
      const int row = i / (Memory::kRanks / 8), r = i % (Memory::kRanks / 8) * 8;
      if (row >= tile.rows || r >= rank) continue;
      float sums[8] = {};
#pragma unroll 2
      for (int w = 0; w < memory.warps; ++w) {
        float numbers[2][4];
        const float* const from = memory.products(ring.slot, w) + row * Memory::kPitch + r;
        load(numbers[0], from), load(numbers[1], from + 4);
#pragma unroll
        for (int n = 0; n < 8; ++n) sums[n] += numbers[n / 4][n % 4];
      }
      const int64_t at = (int64_t{tile.row} + row) * rank + r;
      if (p.division.slices == 1) store(static_cast<T*>(c.product) + at, sums);
      else store(p.products + tile.slice * c.rows.tokens * rank + at, sums);
    }
    __syncwarp();
    if (lane() == 0) barrier_arrive(memory.products_empty(ring.slot));
    ring.advance(kBuffers);
  }
}

// Zeroes the gradients of groups without rows, each in one block. Called by a warp.
template <class Out>
DEVICE void clear_empty_groups(const LowRankPass& c, const GroupTable& table) {
  const int vectors = static_cast<int>(c.rank * c.rows.columns * sizeof(Out) / sizeof(uint4));
  for (int group = blockIdx.x; group < c.sizes.groups; group += gridDim.x) {
    if (table.first_row[group] != table.first_row[group + 1]) continue;
    auto* const to = static_cast<uint4*>(c.gradient) + int64_t{group} * vectors;
    for (int i = lane(); i < vectors; i += 32) to[i] = {0, 0, 0, 0};
  }
}

// A warp that multiplies.
template <class T, int kUnits, bool kProduct, bool kGradient>
struct Multiplier {
  using Memory = BlockMemory<kUnits>;
  static constexpr int kSteps = Memory::kColumns / 16, kChunkSteps = kChunkColumns / 16;
  static constexpr int kPartLoads = 2 * kChunkSteps;  // at once

  const Params& p;
  const Memory memory;
  BlockState& state;
  uint32_t factor[kProduct ? kUnits : 1][kSteps][4];
  float gradient[kGradient ? kUnits : 1][2 * kSteps][4];

  DEVICE Multiplier(const Params& p, const Memory& memory, BlockState& state) : p(p), memory(memory), state(state) {}
  DEVICE int first_column(int slice) const {
    return slice * p.division.slice_columns + warp() * p.division.warp_columns;
  }
  // The steps of this warp, in whole chunks.
  DEVICE int steps_of(int slice) const {
    const int rest = static_cast<int>(p.call.rows.columns) - first_column(slice),
              columns = min(p.division.warp_columns, rest);
    return columns <= 0 ? 0 : (columns + kChunkColumns - 1) / kChunkColumns * kChunkSteps;
  }

  // body(step) for each of these steps, in whole chunks.
  template <class Body>
  DEVICE static void each_step(int steps, Body body) {
#pragma unroll
    for (int first = 0; first < kSteps; first += kChunkSteps) {
      if (first >= steps) break;
#pragma unroll
      for (int step = first; step < first + kChunkSteps; ++step) body(step);
    }
  }

  DEVICE void run() {
    const int count = state.schedule.count();
    Ring ring, buffers;
#pragma unroll 1
    for (int done = 0; done < count;) {
      barrier_wait(memory.full(ring.slot), ring.phase);
      const Arrival& tile = state.arrivals[ring.slot];
      const bool has_rows = tile.part == Arrival::kRowsOfTile;
      const int steps = steps_of(tile.slice);
      if (has_rows) {
        clear_rest(tile.rows, tile.slice, ring.slot, steps);
        if (kGradient && tile.begins) clear_gradient();
        if constexpr (kProduct) multiply(tile, ring.slot, steps, buffers);
        if constexpr (kGradient) add_to_gradient(ring.slot, steps);
        ++done;
      } else if constexpr (kProduct) {
        if (p.call.by_columns) load_factor<true>(tile, ring.slot, steps);
        else load_factor<false>(tile, ring.slot, steps);
      }
      const RowTile last = tile;
      __syncwarp();
      if (lane() == 0) barrier_arrive(memory.empty(ring.slot));
      ring.advance(memory.stages);
      if (kGradient && has_rows && last.ends) end_group(last);
    }
  }

  // Rows and columns that do not exist have what earlier tiles left, which may be NaN: zeros in their place.
  DEVICE void clear_rest(int rows, int slice, int stage, int steps) const {
    const int columns = static_cast<int>(p.call.rows.columns) - first_column(slice);
    if (rows == kRows && columns >= steps * 16) return;
    uint8_t* const to = memory.rows(stage) + warp() * p.division.warp_columns * 2;
    for (int i = lane(); i < kRows * steps * 2; i += 32) {
      const int row = i / (steps * 2), column = i % (steps * 2) * 8;
      if (row >= rows || column >= columns)
        *reinterpret_cast<uint4*>(to + row * memory.row_bytes + column * 2) = {0, 0, 0, 0};
    }
    ptx::async_proxy_fence();
    __syncwarp();
  }
  // The same of a part of a factor [columns, rank], which begins `before` columns before this warp's.
  DEVICE void clear_rest_by_columns(int slice, int stage, int steps, int before) const {
    const int columns = max(0, static_cast<int>(p.call.rows.columns) - first_column(slice)),
              chunks = static_cast<int>(p.call.rank) / 8;
    if (columns >= steps * 16) return;
    for (int i = columns * chunks + lane(); i < steps * 16 * chunks; i += 32)
      if (const int at = before + i / chunks; at >= 0 && at < p.division.slice_columns / kUnits)
        *reinterpret_cast<uint4*>(memory.rows(stage) + (before * chunks + i) * 16) = {0, 0, 0, 0};
    ptx::async_proxy_fence();
    __syncwarp();
  }
  DEVICE void clear_gradient() {
#pragma unroll
    for (auto& unit : gradient)
#pragma unroll
      for (auto& block : unit)
#pragma unroll
        for (float& x : block) x = 0.f;
  }

  // Values read for ranks that do not exist are multiplied but never used.
  template <bool kByColumns>
  DEVICE void load_factor(const Arrival& tile, int stage, int steps) {
    const int line = lane() % 8 + (kByColumns ? lane() / 16 : lane() / 8 % 2) * 8,
              chunk = kByColumns ? lane() / 8 % 2 : lane() / 16;
    const int width = p.division.slice_columns / kUnits;  // of a part by columns
    const int before = warp() * p.division.warp_columns - (kByColumns ? tile.part * width : 0);
    const int pitch = kByColumns ? static_cast<int>(p.call.rank) * 2 : memory.row_bytes;
    if constexpr (kByColumns) clear_rest_by_columns(tile.slice, stage, steps, before);
    else clear_rest(kRows, tile.slice, stage, steps);
    const uint32_t from = ptx::smem_address(memory.rows(stage)) + (line + (kByColumns ? before : 0)) * pitch +
                          (chunk * 8 + (kByColumns ? 0 : before)) * 2;
    each_step(steps, [&](int step) INLINE {
      const int at = before + step * 16;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        if (kUnits > 1 && (kByColumns ? at < 0 || at >= width : unit != tile.part)) continue;
        if constexpr (kByColumns)
          ptx::load_matrix_x4_transposed(factor[unit][step], from + step * 16 * pitch + unit * 32);
        else ptx::load_matrix_x4(factor[unit][step], from + step * 32);
      }
    });
  }

  // The address that this lane gives for four 8x8 matrices: rows 0 to 7 and 8 to 15 of two chunks of eight columns.
  DEVICE uint32_t rows_address(int stage) const {
    return ptx::smem_address(memory.rows(stage)) + (lane() % 8 + lane() / 16 * 8) * memory.row_bytes +
           warp() * p.division.warp_columns * 2 + lane() / 8 % 2 * 16;
  }

  // This warp's columns' share of the products of a tile. Two sums, of every other step, are under way at once.
  DEVICE void multiply(const RowTile& tile, int stage, int steps, Ring& buffers) const {
    const uint32_t from = rows_address(stage);
    float sums[kUnits][2][2][4] = {};
    each_step(steps, [&](int step) INLINE {
      uint32_t x[4];
      ptx::load_matrix_x4(x, from + step * 32);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        ptx::warp_mma<T>(sums[unit][step % 2][0], factor[unit][step], x[0], x[1]);
        ptx::warp_mma<T>(sums[unit][step % 2][1], factor[unit][step], x[2], x[3]);
      }
    });
    barrier_wait(memory.products_empty(buffers.slot), buffers.phase ^ 1);
    float* const to = memory.products(buffers.slot, warp()) + lane() / 4;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        to[(i / 4 * 8 + lane() % 4 * 2 + i % 2) * Memory::kPitch + unit * 16 + i / 2 % 2 * 8] =
            sums[unit][0][i / 4][i % 4] + sums[unit][1][i / 4][i % 4];
    if (threadIdx.x == 0) state.of_products[buffers.slot] = tile;
    __syncwarp();
    if (lane() == 0) barrier_arrive(memory.products_full(buffers.slot));
    buffers.advance(kBuffers);
  }

  // Ranks that do not exist use whatever values are there; their results are not stored.
  DEVICE void add_to_gradient(int stage, int steps) {
    const int pitch = static_cast<int>(p.call.rank) * 2;
    const uint32_t from = rows_address(stage),
                   low = ptx::smem_address(memory.low(stage)) + (lane() % 8 + lane() / 16 * 8) * pitch;
    uint32_t factors[kUnits][4];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
      ptx::load_matrix_x4_transposed(factors[unit], low + min(unit * 32 + lane() / 8 % 2 * 16, pitch - 16));
    each_step(steps, [&](int step) INLINE {
      uint32_t x[4];
      ptx::load_matrix_x4_transposed(x, from + step * 32);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        ptx::warp_mma<T>(gradient[unit][2 * step], factors[unit], x[0], x[2]);
        ptx::warp_mma<T>(gradient[unit][2 * step + 1], factors[unit], x[1], x[3]);
      }
    });
  }

  template <class Out>
  DEVICE void store_gradient(const RowTile& tile) const {
    const LowRankPass& c = p.call;
    const int columns = static_cast<int>(c.rows.columns), rank = static_cast<int>(c.rank);
    constexpr int kLine = Memory::kLine, kShortLine = Memory::kShortLine;
    float* const scratch = memory.scratch(warp());
    float* const put =
        scratch + (c.by_columns ? lane() % 4 * 2 * kLine + lane() / 4 : lane() / 4 * kShortLine + lane() % 4 * 2);
    const int next_column = c.by_columns ? kLine : 1, next_rank = c.by_columns ? 8 : 8 * kShortLine;
    // Eight numbers of half the lanes: eight ranks of a column, or eight columns of a rank.
    const int r = c.by_columns ? lane() % 2 * 8 : lane() % 16, across = c.by_columns ? lane() % 16 / 2 : 0;
    const float* const get = scratch + (c.by_columns ? across * kLine + r : r * kShortLine);
    Out* const to = static_cast<Out*>(c.gradient) + tile.group * c.rank * c.rows.columns;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (int block = 0; block < 2 * kSteps; ++block) {
        if (block * 8 >= p.division.warp_columns) break;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) put[i / 2 * next_rank + i % 2 * next_column] = gradient[unit][block][i];
        __syncwarp();
        const int at_rank = unit * 16 + r, column = first_column(tile.slice) + block * 8 + across;
        if (lane() >= 16 || at_rank >= rank || column >= columns) continue;
        float numbers[8];
        for (int i = 0; i < 8; ++i) numbers[i] = get[i];
        store(to + (c.by_columns ? column * rank + at_rank : at_rank * columns + column), numbers);
      }
  }

  // This lane's part of a block's share of a gradient, one of at most two per block.
  DEVICE float4* part(int block, bool has_start) const {
    const int64_t of_warp = p.division.part_numbers / p.division.warps;
    return reinterpret_cast<float4*>(p.parts + (block * 2 + has_start) * p.division.part_numbers + warp() * of_warp) +
           lane();
  }
  DEVICE void store_part(float4* to) const {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (int block = 0; block < 2 * kSteps; ++block) {
        if (block * 8 >= p.division.warp_columns) break;
        const float (&from)[4] = gradient[unit][block];
        *to = {from[0], from[1], from[2], from[3]}, to += 32;
      }
  }
  DEVICE void add_part(const float4* from) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (int first = 0; first < 2 * kSteps; first += kPartLoads) {
        if (first * 8 >= p.division.warp_columns) break;
        float4 numbers[kPartLoads];
#pragma unroll
        for (int i = 0; i < kPartLoads; ++i) numbers[i] = from[i * 32];
        from += kPartLoads * 32;
#pragma unroll
        for (int i = 0; i < kPartLoads; ++i) {
          float (&to)[4] = gradient[unit][first + i];
          to[0] += numbers[i].x, to[1] += numbers[i].y, to[2] += numbers[i].z, to[3] += numbers[i].w;
        }
      }
  }
  // For a gradient shared by several blocks: whether this warp is the last to finish, and then holds the sum. The order
  // does not matter: two numbers have one sum, and more are added in the order of their blocks.
  DEVICE bool sum_of_parts(const RowTile& tile) {
    const Schedule& schedule = state.schedule;
    const Tasks tasks(schedule.tiles, p.division);
    const int from = tile.slice * schedule.tiles, block = blockIdx.x,
              begin = tasks.block_of(from + schedule.first_tile[tile.group]),
              end = tasks.block_of(from + schedule.first_tile[tile.group + 1] - 1);
    const uint32_t others = end - begin;
    uint32_t* const there = p.parts_there + begin * kMultipliers + warp();
    if (others > 1 || __ballot_sync(~0u, load_acquire(there) < others)) {
      store_part(part(block, tile.has_start));
      __syncwarp();
      uint32_t before = 0;
      if (lane() == 0) before = add_acquire_release(there, 1);
      if (__shfl_sync(~0u, before, 0) < others) return false;
      __syncwarp();
    }
    if (others > 1) clear_gradient();
    for (int other = begin; other <= end; ++other)
      if (others > 1 || other != block) add_part(part(other, other == begin));
    return true;
  }
  DEVICE void end_group(const RowTile& tile) {
    if (!tile.has_whole && !sum_of_parts(tile)) return;
    if (p.call.gradient_type == DType::kFloat32) store_gradient<float>(tile);
    else store_gradient<T>(tile);
  }
};

template <class T, int kUnits, bool kProduct, bool kGradient>
__global__ void __launch_bounds__(kThreads, 1) low_rank_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ BlockState state;
  const BlockMemory<kUnits> memory{dynamic, p.division.row_bytes, p.division.stage_bytes, p.division.stages,
                                   p.division.warps};
  if (threadIdx.x == 0) memory.init_barriers(p.call.gathered);
  ptx::wait_for_earlier_kernels();
  if (warp() == kMultipliers) state.schedule.find(p, memory.groups());
  __syncthreads();
  if (warp() < kMultipliers) {
    ptx::registers_increase<232>();
    if (warp() < memory.warps) Multiplier<T, kUnits, kProduct, kGradient>(p, memory, state).run();
  } else {
    ptx::registers_decrease<40>();
    if (warp() == kMultipliers) Loader<T, kUnits, kProduct, kGradient>{p, memory, state}.run();
    if (warp() == kMultipliers + 1 && p.call.gathered && ptx::elect_one()) store_gathered(p, memory, state);
    if (kProduct && warp() == kMultipliers + 2) add_products<T>(p, memory, state);
    if (kGradient && warp() == kMultipliers + 3) {
      if (p.call.gradient_type == DType::kFloat32) clear_empty_groups<float>(p.call, state.schedule);
      else clear_empty_groups<T>(p.call, state.schedule);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kSliceThreads) add_slices_kernel(const __grid_constant__ Params p) {
  ptx::let_next_kernel_begin();
  ptx::wait_for_earlier_kernels();
  const LowRankPass& c = p.call;
  const int64_t rows = rows_before(c.sizes, c.sizes.groups, c.rows.tokens);
  const int64_t i = blockIdx.x * int64_t{kSliceThreads} + threadIdx.x;
  if (i >= rows * c.rank) return;
  float sum = 0.f;
  for (int slice = 0; slice < p.division.slices; ++slice) sum += p.products[slice * c.rows.tokens * c.rank + i];
  static_cast<T*>(c.product)[i] = static_cast<T>(sum);
}

// Slices have as many columns as each other, but for the last, and so have warps.
Division divide(int64_t columns, int64_t rank, int groups, int device) {
  Division d{.units = rank > 32 ? 4 : rank > 16 ? 2 : 1, .blocks = device_properties(device).multiprocessors};
  const int64_t chunks = blocks_of(columns, kChunkColumns), most = kMultipliers * 4 / d.units,
                of_slice = blocks_of(chunks, blocks_of(chunks, most)), of_warp = blocks_of(of_slice, kMultipliers);
  d.warps = static_cast<int>(blocks_of(of_slice, of_warp));
  d.warp_columns = static_cast<int>(of_warp) * kChunkColumns, d.slice_columns = d.warps * d.warp_columns;
  d.slices = static_cast<int>(blocks_of(columns, d.slice_columns));
  d.part_numbers = int64_t{16} * d.units * d.slice_columns;
  d.row_bytes = d.slice_columns * 2 + 16;  // then eight rows of a warp do not meet in a bank
  d.stage_bytes = kRows * (d.row_bytes + static_cast<int>(rank) * 2);
  const int room = device_properties(device).shared_memory_per_block - static_cast<int>(sizeof(BlockState)) -
                   GroupTable::bytes(groups);
  dispatch<1, 2, 4>(d.units, [&](auto units) {
    d.stages = std::min(kMostStages, (room - BlockMemory<units.value>::other_bytes(d.warps)) / d.stage_bytes);
  });
  return d;
}

int64_t counters_bytes(const Division& d) { return int64_t{d.blocks} * kMultipliers * sizeof(unsigned); }
int64_t parts_bytes(const Division& d) { return 2 * d.blocks * d.part_numbers * static_cast<int64_t>(sizeof(float)); }

template <class T, int kUnits, bool kProduct, bool kGradient>
void launch(const Params& p, cudaStream_t stream) {
  const void* const kernel = reinterpret_cast<const void*>(&low_rank_kernel<T, kUnits, kProduct, kGradient>);
  const Division& d = p.division;
  const int shared =
      BlockMemory<kUnits>::other_bytes(d.warps) + d.stages * d.stage_bytes + GroupTable::bytes(p.call.sizes.groups);
  FUSIBLE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                     "shared memory of a pass over rows of low rank");
  FUSIBLE_CUDA_CHECK(launch_overlapping(kernel, d.blocks, kThreads, shared, stream, p), "a pass over ",
                     p.call.rows.tokens, " rows of ", p.call.rows.columns, " columns, rank ", p.call.rank, ", ",
                     p.call.sizes.groups, " groups");
}

// For ranks above 16, factor and gradient together do not fit into the registers.
template <class T, int kUnits>
void launch(const Params& p, cudaStream_t stream) {
  Params first = p, second = p;
  first.call.gradient = nullptr;
  if (p.call.product) second.call.gathered = nullptr;
  if constexpr (kUnits == 1)
    if (p.call.product && p.call.gradient) return launch<T, kUnits, true, true>(p, stream);
  if (p.call.product) launch<T, kUnits, true, false>(first, stream);
  if (p.call.gradient) launch<T, kUnits, false, true>(second, stream);
}

template <class T>
void launch_all(const Params& p, cudaStream_t stream) {
  const LowRankPass& c = p.call;
  if (c.rows.tokens || c.gradient)
    dispatch<1, 2, 4>(p.division.units, [&](auto units) { launch<T, units.value>(p, stream); });
  if (c.product && p.division.slices > 1 && c.rows.tokens) {
    const auto blocks = static_cast<unsigned>(blocks_of(c.rows.tokens * c.rank, kSliceThreads));
    FUSIBLE_CUDA_CHECK(
        launch_overlapping(reinterpret_cast<const void*>(&add_slices_kernel<T>), blocks, kSliceThreads, 0, stream, p),
        "adding up products of ", p.division.slices, " slices of columns");
  }
}

}  // namespace

int64_t low_rank_workspace(int64_t tokens, int64_t columns, int64_t rank, bool gradient, int device) {
  const Division d = divide(columns, rank, 0, device);
  return (gradient ? counters_bytes(d) + parts_bytes(d) : 0) + (d.slices > 1 ? d.slices * tokens * rank * 4 : 0);
}

void low_rank_pass(const LowRankPass& c, int device, cudaStream_t stream) {
  if (!c.sizes.groups || !c.rows.columns) return;
  FUSIBLE_CHECK(c.rank >= 8 && c.rank <= kMaxLowRank && c.rank % 8 == 0, "takes ranks of 8 to ", kMaxLowRank,
                " that are multiples of 8, got ", c.rank);
  FUSIBLE_CHECK(c.sizes.groups <= kMaxGroups, "takes 1 to ", kMaxGroups, " groups, got ", c.sizes.groups);
  const DeviceGuard guard(device);
  const Division division = divide(c.rows.columns, c.rank, c.sizes.groups, device);
  FUSIBLE_CHECK((c.rows.tokens / kRows + c.sizes.groups) * division.slices < INT32_MAX, "takes fewer rows than ",
                c.rows.tokens, " of ", c.rows.columns, " columns");
  auto* const workspace = static_cast<uint8_t*>(c.workspace);
  Params p{c, division, nullptr, nullptr, reinterpret_cast<float*>(workspace)};
  p.call.sizes.wrong = wrong_size_word(device);
  if (c.gradient) {
    uint8_t* const parts = workspace + counters_bytes(division);
    p.parts_there = reinterpret_cast<unsigned*>(workspace), p.parts = reinterpret_cast<float*>(parts);
    p.products = reinterpret_cast<float*>(parts + parts_bytes(division));
    zero({{{p.parts_there, division.blocks * kMultipliers}}, {}}, device, stream);
  }
  dispatch_dtype_of_16_bits(c.rows.type, [&](auto type) { launch_all<Element<decltype(type)::value>>(p, stream); });
}

}  // namespace fusible
