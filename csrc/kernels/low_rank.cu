// SPDX-License-Identifier: Apache-2.0
// Each block takes as many tiles of 16 rows as every other, of one group after the other, and each of its warps some of
// the columns. A warp keeps its columns of the factor, and of the gradient of the group at hand, in registers: rows
// pass through shared memory once. Products are summed over the warps of a block. Blocks whose share ends within a
// group leave their part of its gradient to a second kernel, which adds the parts in the order of the rows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "device/barrier.cuh"
#include "device/bulk_copy.cuh"
#include "device/element.cuh"
#include "device/groups.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/warp_mma.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/low_rank.h"
#include "fusible/wrong_sizes.h"

namespace fusible {
namespace {

constexpr int kRows = 16, kStages = 3, kMostWarps = 16, kThreads = 256;  // of a tile; of the kernels that add parts

// How columns and rows are divided. Ranks count in units of 16.
struct Division {
  int units, warps, slices, blocks;  // slices of the columns, of which a block works on one at a time
  int slice_columns;                 // those of the warps of a block together
  int64_t part_numbers;              // of a gradient of all ranks of a slice
};

struct Params {
  LowRankPass call;
  Division division;
  int32_t* first_tiles;     // of each group, and the number of all, for the kernel that adds parts
  float *parts, *products;  // of gradients, two for each block; of slices [slices, tokens, rank]
};

// Rows and tiles before each group.
struct GroupTable {
  int first_row[kMaxGroups + 1], first_tile[kMaxGroups + 1];
};

// By one warp.
DEVICE void find_groups(const SplitSizes& sizes, int tokens, GroupTable& to) {
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

// Tasks are the tiles of all groups, for one slice of the columns after the other. They are dealt to blocks, or to as
// many of these as there are tasks, in their order; the first blocks may have one more than the others.
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
  bool begins, ends;  // the block's tiles of the group and slice
};

// What a block does, tile by tile. In shared memory, for registers are few.
struct Schedule : GroupTable {
  int groups, tiles, first, last;

  // By one warp.
  DEVICE void find(const Params& p) {
    find_groups(p.call.sizes, static_cast<int>(p.call.rows.tokens), *this);
    __syncwarp();
    if (blockIdx.x == 0)
      for (int group = threadIdx.x; group <= p.call.sizes.groups; group += 32) p.first_tiles[group] = first_tile[group];
    if (threadIdx.x) return;
    groups = p.call.sizes.groups, tiles = first_tile[groups];
    const Tasks tasks(tiles, p.division);
    first = tasks.first(blockIdx.x), last = tasks.first(blockIdx.x + 1);
  }
  DEVICE int count() const { return last - first; }

  DEVICE RowTile operator[](int i) const {
    const int task = first + i;
    if (task >= last) return {};
    const int slice = task / tiles, tile = task - slice * tiles;
    int group = 0;
    for (int step = kMaxGroups; step; step /= 2)  // the last group with no more tiles before it
      if (group + step < groups && first_tile[group + step] <= tile) group += step;
    const int before = tile - first_tile[group], row = first_row[group] + before * kRows;
    return {group,
            slice,
            row,
            min(kRows, first_row[group + 1] - row),
            i == 0 || before == 0,
            task + 1 == last || tile + 1 == first_tile[group + 1]};
  }
  // Whether all of a group's rows are this block's; else, whether its first are.
  DEVICE bool has_whole(const RowTile& tile) const {
    return has_start(tile) && tile.slice * tiles + first_tile[tile.group + 1] <= last;
  }
  DEVICE bool has_start(const RowTile& tile) const { return tile.slice * tiles + first_tile[tile.group] >= first; }
};

// Shared memory of a block, behind one another: the stages' barriers; stages of rows; stages of `low`; slots of rows to
// be gathered; products by warp.
template <int kUnits>
struct BlockMemory {
  static constexpr int kColumns = 128 / kUnits, kRanks = 16 * kUnits;  // of a warp
  static constexpr int kLowBytes = kRows * kRanks * 2, kSlots = 4, kSlotBytes = kRows * 4, kBarrierBytes = 64;
  static constexpr int kPitch = kRanks + 4;  // of products: then no two lanes of a warp store to one bank
  static constexpr int kProductFloats = kRows * kPitch;
  static constexpr int kLine = 24, kShortLine = 12;  // of 16 ranks, and of 8 columns, of a gradient on its way out
  static_assert(kStages * 8 <= kBarrierBytes && kProductFloats >= 32 * 16 / 2 && kProductFloats >= 16 * kShortLine);

  uint8_t* shared;
  int warps;

  // Then eight rows of a warp do not meet in a bank.
  DEVICE int row_bytes() const { return warps * kColumns * 2 + 16; }
  DEVICE uint64_t* barrier(int stage) const { return reinterpret_cast<uint64_t*>(shared) + stage; }
  DEVICE uint8_t* rows(int stage) const { return shared + kBarrierBytes + stage * kRows * row_bytes(); }
  DEVICE uint8_t* low(int stage) const { return rows(kStages) + stage * kLowBytes; }
  DEVICE int* slots(int i) const { return reinterpret_cast<int*>(low(kStages) + i % kSlots * kSlotBytes); }
  DEVICE float* products(int warp) const {
    return reinterpret_cast<float*>(low(kStages) + kSlots * kSlotBytes) + warp * kProductFloats;
  }
  static int bytes(int warps) {
    return kBarrierBytes + kStages * (kRows * (warps * kColumns * 2 + 16) + kLowBytes) + kSlots * kSlotBytes +
           warps * kProductFloats * 4;
  }
};

template <class T, int kUnits, bool kProduct, bool kGradient>
struct Pass {
  using Memory = BlockMemory<kUnits>;
  static constexpr int kColumns = Memory::kColumns, kRanks = Memory::kRanks, kSteps = kColumns / 16;

  const Params& p;
  const Memory memory;
  uint32_t factor[kProduct ? kUnits : 1][kSteps][4];
  float gradient[kGradient ? kUnits : 1][2 * kSteps][4];

  DEVICE Pass(const Params& p, uint8_t* shared) : p(p), memory{shared, p.division.warps} {}
  DEVICE static int lane() { return threadIdx.x % 32; }
  DEVICE static int warp() { return threadIdx.x / 32; }
  DEVICE int first_column(int slice) const { return (slice * p.division.warps + warp()) * kColumns; }

  // Those of a row that a slice has.
  DEVICE uint32_t bytes_of(int slice) const {
    const int width = p.division.slice_columns;
    return min(width, static_cast<int>(p.call.rows.columns) - slice * width) * 2;
  }

  // By the first warp: a tile on its way to a stage, a lane a row of it, another its `low`. `slots` are the tile's.
  DEVICE void load(const RowTile& tile, int stage, const int* slots) const {
    const LowRankPass& c = p.call;
    if (!tile.rows) return;
    uint64_t* const barrier = memory.barrier(stage);
    const uint32_t row_bytes = bytes_of(tile.slice), low_bytes = kGradient ? static_cast<uint32_t>(c.rank) * 2 : 0;
    if (lane() == 0) barrier_arrive_expecting(barrier, tile.rows * (row_bytes + low_bytes));
    __syncwarp();
    const int row = lane() % kRows, at = tile.row + row;
    if (row >= tile.rows) return;
    if (lane() < kRows) {
      const int64_t from = c.slot_of_row ? slots[row] / c.top_k : at;
      bulk::load(memory.rows(stage) + row * memory.row_bytes(),
                 static_cast<const T*>(c.rows.data) + from * c.rows.pitch + tile.slice * p.division.slice_columns,
                 row_bytes, barrier);
    } else if constexpr (kGradient) {
      bulk::load(memory.low(stage) + row * kRanks * 2, static_cast<const T*>(c.low) + at * c.rank, low_bytes, barrier);
    }
  }

  // By the same.
  DEVICE void store_gathered(const RowTile& tile, int stage) const {
    const LowRankPass& c = p.call;
    if (lane() >= tile.rows) return;
    T* const to = static_cast<T*>(c.gathered) + int64_t{tile.row + lane()} * c.rows.columns;
    bulk::store(to + tile.slice * p.division.slice_columns, memory.rows(stage) + lane() * memory.row_bytes(),
                bytes_of(tile.slice));
    tma::commit();
  }

  // Ranks that do not exist are never copied.
  DEVICE void clear_low() const {
    for (int i = threadIdx.x * 16; i < kStages * Memory::kLowBytes; i += blockDim.x * 16)
      *reinterpret_cast<uint4*>(memory.low(0) + i) = {0, 0, 0, 0};
  }

  // Rows and columns that do not exist have what earlier tiles left, which may be NaN: zeros in their place.
  DEVICE void clear_rest(const RowTile& tile, int stage) const {
    const int columns = static_cast<int>(p.call.rows.columns) - first_column(tile.slice);
    if (tile.rows < kRows || columns < kColumns)
      for (int i = lane(); i < kRows * kColumns / 8; i += 32) {
        const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
        if (row >= tile.rows || column >= columns)
          *reinterpret_cast<uint4*>(memory.rows(stage) + row * memory.row_bytes() +
                                    (warp() * kColumns + column) * 2) = {0, 0, 0, 0};
      }
    if (tile.rows == kRows) return __syncwarp();
    if constexpr (kGradient)
      for (int i = threadIdx.x * 16; i < (kRows - tile.rows) * kRanks * 2; i += blockDim.x * 16)
        *reinterpret_cast<uint4*>(memory.low(stage) + tile.rows * kRanks * 2 + i) = {0, 0, 0, 0};
    ptx::async_proxy_fence();
    __syncthreads();
  }

  DEVICE void begin_group(const RowTile& tile) {
    if constexpr (kProduct) {
      if (p.call.by_columns) load_factor<true>(tile);
      else load_factor<false>(tile);
    }
    if constexpr (kGradient) {
#pragma unroll
      for (auto& unit : gradient)
#pragma unroll
        for (auto& block : unit)
#pragma unroll
          for (float& x : block) x = 0.f;
    }
  }

  // Through the room for this warp's products, 32 columns of 16 ranks at a time.
  template <bool kByColumns>
  DEVICE void load_factor(const RowTile& tile) {
    const int columns = static_cast<int>(p.call.rows.columns), rank = static_cast<int>(p.call.rank);
    const T* const from = static_cast<const T*>(p.call.factor) + tile.group * p.call.rank * p.call.rows.columns;
    constexpr int kLine = kByColumns ? 2 : 4, kLines = 32 / kLine;  // chunks of eight ranks, or of eight columns
    auto* const scratch = reinterpret_cast<uint4*>(memory.products(warp()));
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (int first = 0; first < kSteps; first += 2) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int line = lane() / kLine + i * kLines, chunk = lane() % kLine * 8;
          const int r = unit * 16 + (kByColumns ? chunk : line),
                    column = first_column(tile.slice) + first * 16 + (kByColumns ? line : chunk);
          uint4 x = {0, 0, 0, 0};  // an ordinary load, which stays between the barriers: more at once take registers
          if (r < rank && column < columns)
            x = *reinterpret_cast<const uint4*>(from + (kByColumns ? column * rank + r : r * columns + column));
          scratch[i * 32 + lane()] = x;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int line = lane() % 8 + (kByColumns ? lane() / 16 * 8 + i * 16 : lane() / 8 % 2 * 8),
                    chunk = kByColumns ? lane() / 8 % 2 : lane() / 16 + i * 2;
          const uint32_t at = ptx::smem_address(scratch + line * kLine + chunk);
          if constexpr (kByColumns) ptx::load_matrix_x4_transposed(factor[unit][first + i], at);
          else ptx::load_matrix_x4(factor[unit][first + i], at);
        }
      }
    __syncwarp();
  }

  // The address that this lane gives for four 8x8 matrices: rows 0 to 7 and 8 to 15 of two chunks of eight columns.
  DEVICE uint32_t rows_address(int stage) const {
    return ptx::smem_address(memory.rows(stage)) + (lane() % 8 + lane() / 16 * 8) * memory.row_bytes() +
           warp() * kColumns * 2 + lane() / 8 % 2 * 16;
  }

  // This warp's columns' share of the products of a tile.
  DEVICE void multiply(int stage) const {
    const uint32_t from = rows_address(stage);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float sums[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t x[4];
        ptx::load_matrix_x4(x, from + step * 32);
        ptx::warp_mma<T>(sums[0], factor[unit][step], x[0], x[1]);
        ptx::warp_mma<T>(sums[1], factor[unit][step], x[2], x[3]);
      }
      float* to = memory.products(warp()) + unit * 16 + lane() / 4;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        to[(i / 4 * 8 + lane() % 4 * 2 + i % 2) * Memory::kPitch + i / 2 % 2 * 8] = sums[i / 4][i % 4];
    }
  }

  DEVICE void add_to_gradient(int stage) {
    const uint32_t from = rows_address(stage), low = ptx::smem_address(memory.low(stage)) +
                                                     (lane() % 8 + lane() / 16 * 8) * kRanks * 2 + lane() / 8 % 2 * 16;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t factors[4];
      ptx::load_matrix_x4_transposed(factors, low + unit * 32);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t x[4];
        ptx::load_matrix_x4_transposed(x, from + step * 32);
        ptx::warp_mma<T>(gradient[unit][2 * step], factors, x[0], x[2]);
        ptx::warp_mma<T>(gradient[unit][2 * step + 1], factors, x[1], x[3]);
      }
    }
  }

  // Products of a tile, summed over the warps in their order.
  DEVICE void store_products(const RowTile& tile) const {
    const LowRankPass& c = p.call;
    const int rank = static_cast<int>(c.rank);
    for (int i = threadIdx.x; i < kRows * kRanks; i += blockDim.x) {
      const int row = i / kRanks, r = i % kRanks;
      if (row >= tile.rows || r >= rank) continue;
      float sum = 0.f;
#pragma unroll 4
      for (int w = 0; w < p.division.warps; ++w) sum += memory.products(w)[row * Memory::kPitch + r];
      const int64_t at = (int64_t{tile.row} + row) * rank + r;
      if (p.division.slices == 1) static_cast<T*>(c.product)[at] = static_cast<T>(sum);
      else p.products[tile.slice * c.rows.tokens * rank + at] = sum;
    }
  }

  // Through the room for this warp's products, which nobody reads any more.
  template <class Out>
  DEVICE void store_gradient(const RowTile& tile) const {
    const LowRankPass& c = p.call;
    const int columns = static_cast<int>(c.rows.columns), rank = static_cast<int>(c.rank);
    constexpr int kLine = Memory::kLine, kShortLine = Memory::kShortLine;
    float* const scratch = memory.products(warp());
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
  DEVICE void store_part(bool has_start) const {
    const int width = p.division.slice_columns;
    float* const to = p.parts + (blockIdx.x * 2 + has_start) * p.division.part_numbers + lane() / 4 * width +
                      warp() * kColumns + lane() % 4 * 2;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (int i = 0; i < 4; i += 2)
#pragma unroll
        for (int block = 0; block < 2 * kSteps; ++block)
          *reinterpret_cast<float2*>(to + (unit * 16 + i * 4) * width + block * 8) = {gradient[unit][block][i],
                                                                                      gradient[unit][block][i + 1]};
  }
  DEVICE void end_group(const RowTile& tile, const Schedule& schedule) const {
    if (!schedule.has_whole(tile)) return store_part(schedule.has_start(tile));
    if constexpr (kProduct) __syncthreads();
    if (p.call.gradient_type == DType::kFloat32) store_gradient<float>(tile);
    else store_gradient<T>(tile);
  }
};

// Two tiles of rows are on their way while one is worked on; slots, whose rows are gathered, two tiles earlier; and
// what a tile is, another one earlier. The first warp copies, the last looks ahead.
template <class T, int kUnits, bool kProduct, bool kGradient>
__global__ void __launch_bounds__(kMostWarps * 32, 1) low_rank_kernel(const __grid_constant__ Params p) {
  constexpr int kTiles = 8, kSlots = BlockMemory<kUnits>::kSlots;
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ Schedule schedule;
  __shared__ RowTile tiles[kTiles];
  Pass<T, kUnits, kProduct, kGradient> pass(p, dynamic);
  if (threadIdx.x < 32) schedule.find(p);
  if (threadIdx.x < kStages) barrier_init(pass.memory.barrier(threadIdx.x), 1);
  if constexpr (kGradient) pass.clear_low();
  barrier_init_fence(), ptx::async_proxy_fence();
  __syncthreads();
  if (threadIdx.x <= kSlots) tiles[threadIdx.x] = schedule[threadIdx.x];
  __syncthreads();
  const auto load_slots = [&](int i) {
    const RowTile& tile = tiles[i % kTiles];
    if (p.call.slot_of_row && threadIdx.x < tile.rows)
      ptx::copy_async_pair(pass.memory.slots(i) + threadIdx.x, p.call.slot_of_row + tile.row + threadIdx.x, 4);
    ptx::copy_async_commit();
  };
  const auto load = [&](int i) { pass.load(tiles[i % kTiles], i % kStages, pass.memory.slots(i)); };
  if (threadIdx.x < 32) {
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) load_slots(i);
    ptx::copy_async_wait<0>();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load(i);
  }
#pragma unroll 1
  for (int i = 0; i < schedule.count(); ++i) {
    const RowTile& tile = tiles[i % kTiles];
    const int stage = i % kStages;
    barrier_wait(pass.memory.barrier(stage), i / kStages % 2);
    __syncthreads();
    if (threadIdx.x < 32) {
      load_slots(i + kSlots);
      ptx::copy_async_wait<kSlots - 2>();
      if (p.call.gathered) tma::wait_read<0>();
      load(i + kStages - 1);
      if (p.call.gathered) pass.store_gathered(tile, stage);
    }
    if (threadIdx.x == blockDim.x - 32) tiles[(i + kSlots + 1) % kTiles] = schedule[i + kSlots + 1];
    pass.clear_rest(tile, stage);
    if (tile.begins) pass.begin_group(tile);
    if constexpr (kProduct) pass.multiply(stage);
    if constexpr (kGradient) pass.add_to_gradient(stage);
    if constexpr (kProduct) {
      __syncthreads();
      pass.store_products(tile);
    }
    if constexpr (kGradient)
      if (tile.ends) pass.end_group(tile, schedule);
  }
  if (threadIdx.x < 32) ptx::copy_async_wait<0>(), tma::wait_all();
}

// A thread has eight ranks of a column. What one block had whole is there already.
template <class Out>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ Params p) {
  const LowRankPass& c = p.call;
  const int group = blockIdx.x, column = blockIdx.y * kThreads + threadIdx.x, first_rank = blockIdx.z * 8;
  if (column >= c.rows.columns) return;
  const int width = p.division.slice_columns, slice = column / width, tiles = p.first_tiles[c.sizes.groups];
  const Tasks tasks(tiles, p.division);
  const int first = slice * tiles + p.first_tiles[group], last = slice * tiles + p.first_tiles[group + 1] - 1;
  float sums[8] = {};
  if (first <= last) {
    const int begin = tasks.block_of(first), end = tasks.block_of(last);
    if (begin == end) return;
    for (int block = begin; block <= end; ++block) {
      const float* part =
          p.parts + (block * 2 + (block == begin)) * p.division.part_numbers + first_rank * width + column % width;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += part[i * width];
    }
  }
  Out* const to = static_cast<Out*>(c.gradient) + group * c.rank * c.rows.columns;
  if (c.by_columns) {
    store(to + column * c.rank + first_rank, sums);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[(first_rank + i) * c.rows.columns + column] = static_cast<Out>(sums[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_slices_kernel(const __grid_constant__ Params p) {
  const LowRankPass& c = p.call;
  const int64_t rows = rows_before(c.sizes, c.sizes.groups, c.rows.tokens);
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= rows * c.rank) return;
  float sum = 0.f;
  for (int slice = 0; slice < p.division.slices; ++slice) sum += p.products[slice * c.rows.tokens * c.rank + i];
  static_cast<T*>(c.product)[i] = static_cast<T>(sum);
}

// Where a slice needs few warps, a multiprocessor has several blocks.
Division divide(int64_t columns, int64_t rank, int device) {
  const int units = rank > 32 ? 4 : rank > 16 ? 2 : 1, warp_columns = 128 / units;
  const int all = static_cast<int>(blocks_of(columns, warp_columns)),
            slices = static_cast<int>(blocks_of(all, kMostWarps)), warps = static_cast<int>(blocks_of(all, slices));
  const int blocks = device_properties(device).multiprocessors * std::min(4, kMostWarps / warps);
  return {units, warps, slices, blocks, warps * warp_columns, int64_t{16} * units * warps * warp_columns};
}

constexpr int64_t kTableBytes = 4 * (kMaxGroups + 4);
int64_t parts_bytes(const Division& d) { return 2 * d.blocks * d.part_numbers * static_cast<int64_t>(sizeof(float)); }

template <class T, int kUnits, bool kProduct, bool kGradient>
void launch(const Params& p, cudaStream_t stream) {
  void (*const kernel)(Params) = low_rank_kernel<T, kUnits, kProduct, kGradient>;
  const int shared = BlockMemory<kUnits>::bytes(p.division.warps);
  FUSIBLE_CUDA_CHECK(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
      "shared memory of a pass over rows of low rank");
  kernel<<<p.division.blocks, p.division.warps * 32, shared, stream>>>(p);
}

// Of higher ranks than 16, the factor and the gradient are too much for the registers together.
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
  if (c.gradient) {
    const dim3 grid(c.sizes.groups, static_cast<unsigned>(blocks_of(c.rows.columns, kThreads)),
                    static_cast<unsigned>(c.rank / 8));
    if (c.gradient_type == DType::kFloat32) add_parts_kernel<float><<<grid, kThreads, 0, stream>>>(p);
    else add_parts_kernel<T><<<grid, kThreads, 0, stream>>>(p);
  }
  if (c.product && p.division.slices > 1 && c.rows.tokens) {
    const auto blocks = static_cast<unsigned>(blocks_of(c.rows.tokens * c.rank, kThreads));
    add_slices_kernel<T><<<blocks, kThreads, 0, stream>>>(p);
  }
}

}  // namespace

int64_t low_rank_workspace(int64_t tokens, int64_t columns, int64_t rank, bool gradient, int device) {
  const Division d = divide(columns, rank, device);
  return kTableBytes + (gradient ? parts_bytes(d) : 0) + (d.slices > 1 ? d.slices * tokens * rank * 4 : 0);
}

void low_rank_pass(const LowRankPass& c, int device, cudaStream_t stream) {
  if (!c.sizes.groups || !c.rows.columns) return;
  FUSIBLE_CHECK(c.rank >= 8 && c.rank <= kMaxLowRank && c.rank % 8 == 0, "takes ranks of 8 to ", kMaxLowRank,
                " that are multiples of 8, got ", c.rank);
  const DeviceGuard guard(device);
  const Division division = divide(c.rows.columns, c.rank, device);
  FUSIBLE_CHECK((c.rows.tokens / kRows + c.sizes.groups) * division.slices < INT32_MAX, "takes fewer rows than ",
                c.rows.tokens, " of ", c.rows.columns, " columns");
  auto* const workspace = static_cast<uint8_t*>(c.workspace);
  uint8_t* const parts = workspace + kTableBytes;
  Params p{c, division, reinterpret_cast<int32_t*>(workspace), reinterpret_cast<float*>(parts),
           reinterpret_cast<float*>(parts + (c.gradient ? parts_bytes(division) : 0))};
  p.call.sizes.wrong = wrong_size_word(device);
  dispatch_dtype_of_16_bits(c.rows.type, [&](auto type) { launch_all<Element<decltype(type)::value>>(p, stream); });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "a pass over ", c.rows.tokens, " rows of ", c.rows.columns, " columns, rank ",
                     c.rank, ", ", c.sizes.groups, " groups");
}

}  // namespace fusible
