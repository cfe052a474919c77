// SPDX-License-Identifier: Apache-2.0
// A stable counting sort. Every warp has a stretch of slots, counts its experts, and, once all counts are known, places
// its slots, 32 at a time: lanes with the same expert find one another by a vote. For few slots, one block does it
// alone; else a first kernel counts for each block.
//
// With more experts than a block has counters for by warp, one warp of each block places slots. There are more blocks
// then, and a kernel in between adds up their counts.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/gemm/groups.cuh"
#include "device/ptx/element.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_config.h"
#include "fusible/routing.h"

namespace fusible {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kMostBuckets = 512 + 1;  // which all warps have counters for
constexpr int64_t kSlotsOfBlock = 8 * kThreads, kMostBlocks = 256;
constexpr int64_t kMostCounts = 1 << 20, kMostManyBlocks = 2048;  // of all blocks, where buckets are more

// Equal stretches for all blocks but the last, which divide into stretches of whole warps.
struct Stretches {
  int64_t slots;
  int blocks;
};
bool has_many(int groups) { return groups + 1 > kMostBuckets; }
Stretches stretches_of(int64_t slots, int groups) {
  const int64_t most = has_many(groups) ? std::min(kMostCounts / (groups + 1), kMostManyBlocks) : kMostBlocks;
  const int64_t wanted = std::clamp<int64_t>(blocks_of(slots, has_many(groups) ? kThreads : kSlotsOfBlock), 1, most);
  const int64_t stretch = std::max<int64_t>(1, blocks_of(slots, wanted * kThreads)) * kThreads;
  return {stretch, static_cast<int>(std::max<int64_t>(1, blocks_of(slots, stretch)))};
}

__device__ int bucket_of(const Route& c, int64_t slot) {
  const int64_t id = read_index(c.ids, c.int64_ids, slot);
  return id < 0 || id >= c.groups ? c.groups : static_cast<int>(id);
}

// workspace[block, bucket]
__global__ void __launch_bounds__(kThreads) count_slots(const __grid_constant__ Route c, int64_t stretch) {
  extern __shared__ __align__(16) int counts[];  // [buckets]
  for (int b = threadIdx.x; b <= c.groups; b += kThreads) counts[b] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * stretch, end = min(c.slots, begin + stretch);
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += kThreads)
    atomicAdd(&counts[bucket_of(c, slot)], 1);  // integers: any order
  __syncthreads();
  for (int b = threadIdx.x; b <= c.groups; b += kThreads)
    c.workspace[static_cast<int64_t>(blockIdx.x) * (c.groups + 1) + b] = counts[b];
}

// visit(slot, bucket, peers) for the slots of a warp, in order; peers: the lanes with the same bucket. Lanes without a
// slot have bucket -1.
template <class Visit>
__device__ void each_slot(const Route& c, int64_t begin, int64_t end, int lane, Visit visit) {
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t slot = base + lane;
    const int bucket = slot < end ? bucket_of(c, slot) : -1;
    visit(slot, bucket, __match_any_sync(~0u, bucket));
    __syncwarp();
  }
}

// Places the slots of a warp, whose next row in each bucket is next[bucket].
__device__ void place_slots(const Route& c, int64_t begin, int64_t end, int lane, int* next) {
  each_slot(c, begin, end, lane, [&](int64_t slot, int bucket, unsigned peers) {
    const int row = bucket < 0 ? 0 : next[bucket] + __popc(peers & ((1u << lane) - 1));
    __syncwarp();
    if (bucket < 0) return;
    if (lane == __ffs(peers) - 1) next[bucket] += __popc(peers);
    c.row_of_slot[slot] = row;
    if (c.slot_of_row) c.slot_of_row[row] = static_cast<int32_t>(slot);
    if (c.scales) c.scales[row] = read_number(c.weights.data, c.weights.type, slot);
  });
}

// Computes the beginning of each bucket from 0 to `last`. Called by one warp.
__device__ void scan_totals(const int* totals, int* starts, int last, int lane) {
  int before = 0;
  for (int base = 0; base <= last; base += 32) {
    const int of_lane = base + lane <= last ? totals[base + lane] : 0;
    const int sum = scan(of_lane, lane);
    if (base + lane <= last) starts[base + lane] = before + sum - of_lane;
    before += __shfl_sync(~0u, sum, 31);
  }
}

__global__ void __launch_bounds__(kThreads) assign_rows(const __grid_constant__ Route c, int64_t stretch) {
  __shared__ int next[kWarps][kMostBuckets];  // counts at first, then the row of the next slot
  __shared__ int totals[kMostBuckets], starts[kMostBuckets], earlier[kMostBuckets];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, buckets = c.groups + 1, block = blockIdx.x;
  const int64_t begin = min(c.slots, block * stretch + warp * (stretch / kWarps)),
                end = min(c.slots, begin + stretch / kWarps);
  for (int b = lane; b < buckets; b += 32) next[warp][b] = 0;
  __syncwarp();
  each_slot(c, begin, end, lane, [&](int64_t, int bucket, unsigned peers) {
    if (bucket >= 0 && lane == __ffs(peers) - 1) next[warp][bucket] += __popc(peers);
  });
  __syncthreads();
  const int blocks = gridDim.x;
  for (int b = threadIdx.x; b < buckets; b += kThreads) {
    int before = 0, total = 0;
    if (blocks == 1) {
      for (int w = 0; w < kWarps; ++w) total += next[w][b];
    } else {
#pragma unroll 8
      for (int other = 0; other < blocks; ++other) {
        const int count = c.workspace[static_cast<int64_t>(other) * buckets + b];
        before += other < block ? count : 0;
        total += count;
      }
    }
    totals[b] = total, earlier[b] = before;
  }
  __syncthreads();
  if (warp == 0) scan_totals(totals, starts, c.groups, lane);
  __syncthreads();
  for (int b = threadIdx.x; b < buckets; b += kThreads) {
    int row = starts[b] + earlier[b];
    for (int w = 0; w < kWarps; ++w) {
      const int count = next[w][b];
      next[w][b] = row;
      row += count;
    }
    if (block == 0) c.tokens_per_expert[b] = b < c.groups ? totals[b] : starts[b];
  }
  __syncthreads();
  place_slots(c, begin, end, lane, next[warp]);
}

// Replaces the counts of each block by the sums over the blocks before it, and adds the totals after the last block. A
// lane has a bucket, and a warp a stretch of the blocks.
__global__ void __launch_bounds__(kThreads) add_up_counts(int32_t* counts, int blocks, int buckets) {
  constexpr int kLoads = 8;  // on their way together
  __shared__ int sums[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, bucket = blockIdx.x * 32 + lane;
  const int each = (blocks + kWarps - 1) / kWarps, begin = min(blocks, warp * each), end = min(blocks, begin + each);
  const auto each_count = [&](auto visit) {
    for (int first = begin; first < end && bucket < buckets; first += kLoads) {
      int x[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        x[i] = first + i < end ? counts[static_cast<int64_t>(first + i) * buckets + bucket] : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (first + i < end) visit(first + i, x[i]);
    }
  };
  int sum = 0;
  each_count([&](int, int count) { sum += count; });
  sums[warp][lane] = sum;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += sums[w][lane];
  each_count([&](int block, int count) {
    counts[static_cast<int64_t>(block) * buckets + bucket] = before;
    before += count;
  });
  if (warp == kWarps - 1 && bucket < buckets) counts[static_cast<int64_t>(blocks) * buckets + bucket] = before;
}

// next[b], how many slots bucket b has, becomes the row of its first; the first block tells of both. A thread has
// neighbouring buckets, an odd number of them, so that lanes do not meet in a bank.
__device__ void find_first_rows(const Route& c, int* next) {
  __shared__ int sums[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, buckets = c.groups + 1;
  const int each = (buckets + kThreads - 1) / kThreads | 1, begin = min(buckets, static_cast<int>(threadIdx.x) * each),
            end = min(buckets, begin + each);
  int mine = 0;
  for (int b = begin; b < end; ++b) mine += next[b];
  const int sum = scan(mine, lane);
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int first = sum - mine;
  for (int w = 0; w < warp; ++w) first += sums[w];
  for (int b = begin; b < end; ++b) {
    const int count = next[b];
    next[b] = first;
    if (blockIdx.x == 0) c.tokens_per_expert[b] = b < c.groups ? count : first;
    first += count;
  }
  __syncthreads();
}

// One block has counted nothing before.
__global__ void __launch_bounds__(kThreads) assign_rows_of_many(const __grid_constant__ Route c, int64_t stretch) {
  extern __shared__ __align__(16) int next[];  // [buckets]
  const int buckets = c.groups + 1, blocks = gridDim.x;
  const int64_t begin = blockIdx.x * stretch, end = min(c.slots, begin + stretch);
  const int32_t *const all = c.workspace + static_cast<int64_t>(blocks) * buckets, *const earlier =
                                                                                       c.workspace +
                                                                                       static_cast<int64_t>(
                                                                                           blockIdx.x) *
                                                                                           buckets;
  for (int b = threadIdx.x; b < buckets; b += kThreads) next[b] = blocks > 1 ? all[b] : 0;
  __syncthreads();
  if (blocks == 1) {
    for (int64_t slot = begin + threadIdx.x; slot < end; slot += kThreads) atomicAdd(&next[bucket_of(c, slot)], 1);
    __syncthreads();
  }
  find_first_rows(c, next);
  if (blocks > 1) {
    for (int b = threadIdx.x; b < buckets; b += kThreads) next[b] += earlier[b];
    __syncthreads();
  }
  if (threadIdx.x < 32) place_slots(c, begin, end, threadIdx.x, next);
}

}  // namespace

int64_t route_workspace_bytes(int64_t slots, int groups) {
  const int blocks = stretches_of(slots, groups).blocks, rows = has_many(groups) ? blocks + 1 : blocks;
  return blocks == 1 ? 0 : rows * (groups + 1) * static_cast<int64_t>(sizeof(int32_t));
}

void route(const Route& c, int device, cudaStream_t stream) {
  FUSIBLE_CHECK(c.groups >= 1 && c.groups <= kMaxGroups, "1 to ", kMaxGroups, " experts can be routed to, got ",
                c.groups);
  FUSIBLE_CHECK(c.slots >= 0 && c.slots < (int64_t{1} << 30), "fewer than 2^30 slots can be routed, got ", c.slots);
  const DeviceGuard guard(device);
  const Stretches stretches = stretches_of(c.slots, c.groups);
  const int blocks = stretches.blocks, buckets = c.groups + 1;
  const size_t shared = buckets * sizeof(int);
  FUSIBLE_CHECK(blocks == 1 || c.workspace, "routing of ", c.slots, " slots needs a workspace, got none");
  if (blocks > 1) count_slots<<<blocks, kThreads, shared, stream>>>(c, stretches.slots);
  if (has_many(c.groups)) {
    if (blocks > 1)
      add_up_counts<<<static_cast<unsigned>(blocks_of(buckets, 32)), kThreads, 0, stream>>>(c.workspace, blocks,
                                                                                            buckets);
    assign_rows_of_many<<<blocks, kThreads, shared, stream>>>(c, stretches.slots);
  } else {
    assign_rows<<<blocks, kThreads, 0, stream>>>(c, stretches.slots);
  }
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "routing of ", c.slots, " slots to ", c.groups, " experts");
}

}  // namespace fusible
