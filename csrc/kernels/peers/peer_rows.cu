// SPDX-License-Identifier: Apache-2.0
// Tokens from the ranks that have them to the rows of those that own their experts, and sums of rows back, read over
// the links by who needs them. As in permute.cu, a warp has a stretch of one token's columns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "device/gemm/arrivals.cuh"
#include "device/gemm/groups.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/signal.cuh"
#include "device/ptx/vector.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_config.h"
#include "fusible/peers.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kSteps = 2;   // vectors of a lane
constexpr int kMostThreads = 1024, kMostWarps = kMostThreads / 32;  // of blocks that shall have a multiprocessor each
constexpr int kStretchBytes = 4096;                                 // of a row, which a warp has under way at once
constexpr int kRowsAtOnce = 4;                                      // of a token, which a sum of those there takes
constexpr int kRowsOfWarp = 4, kLanesOfRow = 32 / kRowsOfWarp;      // a warp announces this many at once
constexpr int kPartsOfBlock = kArrivalRows / kRowsOfWarp;
constexpr int64_t kSlotsOfBlock = 4 * kThreads, kMostBlocks = 64;

template <class T>
__device__ T* in_buffer(const Peers& peers, int rank, int64_t at) {
  return reinterpret_cast<T*>(peers.buffers[rank] + at);
}

// The rows of a rank, and the number that it keeps.
struct Kept {
  int first, count;
};
__device__ Kept kept_by(const int32_t* firsts, int rank, int64_t capacity) {
  const int64_t count = firsts[rank + 1] - firsts[rank];
  return {firsts[rank], static_cast<int>(count < capacity ? count : capacity)};
}

// ---- signals

// The first failure stays. By one thread.
__device__ void fail(const LaneCall& c, Failure failure, int peer, int kind, int64_t seen, unsigned came) {
  if (c.state->failed) return;
  c.state->failed = 1;
  volatile LaneReport& report = *c.report;
  report.peer = peer, report.kind = kind, report.exchange = c.exchange, report.seen = seen, report.came = came;
  fence_system();
  report.failure = static_cast<int64_t>(failure);
}

__device__ uint64_t* signal_of(const Publish& c, int at_rank, int of_rank, uint64_t number) {
  const int64_t line = (number % 2) * c.peers.ranks + of_rank;
  return in_buffer<uint64_t>(c.peers, at_rank, c.signals_at + line * kSignalBytes);
}

// A lane has a peer. A signal is overwritten by the one after the next, which its rank gives once it has this rank's
// next one: so it is still there when this rank looks. By a warp.
__device__ void meet(const Publish& c, uint64_t number, int lane) {
  const bool peer = lane < c.peers.ranks;
  if (peer) {
    fence_system();
    store_release(signal_of(c, lane, c.peers.rank, number), number << kKindBits | static_cast<uint64_t>(c.kind));
  }
  const int64_t deadline = c.timeout ? nanoseconds() + c.timeout : 0;
  uint64_t seen = 0;
  bool came = !peer;
  while (!came) {
    seen = load_acquire(signal_of(c, c.peers.rank, lane, number));
    came = seen >> kKindBits == number;
    if (came || (deadline && nanoseconds() > deadline)) break;
    pause();
  }
  const bool other = peer && came && (seen & ((1 << kKindBits) - 1)) != static_cast<uint64_t>(c.kind);
  const unsigned late = __ballot_sync(~0u, !came), others = __ballot_sync(~0u, other);
  const unsigned there = ~late & ((1u << c.peers.ranks) - 1);
  if (late && lane == __ffs(late) - 1) fail(c, Failure::kLate, lane, c.kind, seen, there);
  else if (!late && others && lane == __ffs(others) - 1) fail(c, Failure::kOther, lane, c.kind, seen, there);
}

template <class Number>
__device__ void write_everywhere(const Publish& c, int64_t at, int64_t slot, Number number) {
  for (int rank = 0; rank < c.peers.ranks; ++rank)
    in_buffer<Number>(c.peers, rank, at)[c.peers.rank * c.most_slots + slot] = number;
}

__device__ void write_slots(const Publish& c) {
  for (int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x; slot < c.most_slots; slot += gridDim.x * kThreads) {
    const bool there = slot < c.slots;
    const int64_t id = there ? read_index(c.ids, c.int64_ids, slot) : -1;
    write_everywhere(c, c.ids_at, slot, static_cast<int32_t>(id >= 0 && id < c.experts ? id : -1));
    if (there && c.number_bytes == 8)
      write_everywhere(c, c.numbers_at, slot, static_cast<const uint64_t*>(c.numbers)[slot]);
    else if (there) write_everywhere(c, c.numbers_at, slot, static_cast<const uint32_t*>(c.numbers)[slot]);
  }
}

__global__ void __launch_bounds__(kThreads) publish_kernel(const __grid_constant__ Publish c) {
  __shared__ bool last;
  if (c.ids) write_slots(c);
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    last = atomicAdd(&c.state->blocks, 1u) == gridDim.x - 1;
    fence_system();
  }
  __syncthreads();
  if (!last || threadIdx.x >= 32) return;
  const uint64_t number = c.state->signals + 1;
  const bool failed = c.state->failed;
  __syncwarp();
  if (threadIdx.x == 0) c.state->blocks = 0, c.state->signals = number;
  if (!failed) meet(c, number, threadIdx.x);
}

// ---- whose rows

// Tells of the rows of all ranks. By one thread.
__device__ void report_rows(const DivideRows& c) {
  LaneState& state = *c.state;
  int64_t required = 0, dropped = 0;
  int owner = 0;
  for (int rank = 0; rank < c.peers.ranks; ++rank) {
    const int64_t rows = c.firsts[rank + 1] - c.firsts[rank];
    if (rows > required) required = rows, owner = rank;
    if (rows > c.capacity) dropped += rows - c.capacity;
  }
  if (required > state.required) state.required = required;
  if (!c.fails) state.dropped += dropped;
  volatile LaneReport& report = *c.report;
  report.required = state.required, report.dropped = state.dropped;
  if (c.fails && dropped) fail(c, Failure::kOverflow, owner, 0, required, 0);
}

// Run by one block, with a warp for each rank.
__global__ void __launch_bounds__(32 * kMaxRanks) divide_kernel(const __grid_constant__ DivideRows c) {
  __shared__ int sums[kMaxRanks];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = c.experts / c.peers.ranks;
  if (warp < c.peers.ranks) {
    int sum = 0;
    for (int expert = lane; expert < each; expert += 32) sum += c.tokens_per_expert[warp * each + expert];
    sum = scan(sum, lane);
    if (lane == 31) sums[warp] = sum;
  }
  __syncthreads();
  if (warp > 0) return;
  if (lane == 0) {
    int first = 0;
    for (int rank = 0; rank < c.peers.ranks; ++rank) c.firsts[rank] = first, first += sums[rank];
    c.firsts[c.peers.ranks] = first;
    report_rows(c);
  }
  int64_t before = 0;
  for (int base = 0; base < each; base += 32) {
    const int expert = base + lane;
    const int64_t size = expert < each ? c.tokens_per_expert[c.peers.rank * each + expert] : 0;
    const int64_t end = before + scan(size, lane), start = end - size;
    if (expert < each)
      c.split_sizes[expert] =
          static_cast<int32_t>((end < c.capacity ? end : c.capacity) - (start < c.capacity ? start : c.capacity));
    before = __shfl_sync(~0u, end, 31);
  }
}

// ---- rows

template <int kVector>
__device__ int64_t column_of(unsigned column_block, int step) {
  return ((column_block * kSteps + step) * int64_t{32} + threadIdx.x % 32) * kVector;
}

// A word of ones, which is NaN of any type; else zeros.
template <class Word>
__device__ Word all_bits(bool ones) {
  Word word;
  memset(&word, ones ? 0xFF : 0, sizeof(Word));
  return word;
}

// Words, not elements: of an array of elements that may become NaN, nvcc stores one by one.
template <class Word>
__device__ void write_row(const PeerRows& c, int64_t row, int row_words, const Word (&x)[kSteps]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t at = column_of<1>(blockIdx.y, step);
    if (at < row_words) static_cast<Word*>(c.out)[row * row_words + at] = x[step];
  }
}

// Reads a row; NaN of any type if the lane has failed.
template <class Word>
__device__ void read_row(const PeerRows& c, const Word* row, int row_words, Word (&x)[kSteps]) {
  const bool failed = c.state->failed;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t at = column_of<1>(blockIdx.y, step);
    if (at < row_words) x[step] = row[at];
    if (failed) x[step] = all_bits<Word>(true);
  }
}

// Neighbouring blocks read from different ranks, so that all links, and the memory of this device, are used all the
// time. Behind those for tokens are blocks for the tail.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    pull_kernel(const __grid_constant__ PeerRows c, int row_words, unsigned token_blocks) {
  const auto [first, count] = kept_by(c.firsts, c.peers.rank, c.capacity);
  const int warp = threadIdx.x / 32, ranks = c.peers.ranks;
  Word x[kSteps] = {};
  if (blockIdx.x >= token_blocks) {
    const int64_t row = (blockIdx.x - token_blocks) * int64_t{kWarps} + warp;
    if (row >= count && row < c.capacity) write_row(c, row, row_words, x);
    return;
  }
  const int source = static_cast<int>((c.peers.rank + 1 + blockIdx.x) % ranks);
  const int64_t token = blockIdx.x / ranks * int64_t{kWarps} + warp;
  if (token >= c.tokens) return;
  const int lane = threadIdx.x % 32;
  bool read = false;
  for (int base = 0; base < c.top_k; base += 32) {
    const int64_t slot = (source * c.tokens + token) * c.top_k + base + lane;
    const unsigned row = base + lane < c.top_k ? c.row_of_slot[slot] - first : ~0u;
    unsigned here = __ballot_sync(~0u, row < count);
    if (here && !read)
      read_row(c, in_buffer<const Word>(c.peers, source, c.at) + token * row_words, row_words, x), read = true;
    for (; here; here &= here - 1) write_row(c, __shfl_sync(~0u, row, __ffs(here) - 1), row_words, x);
  }
}

// The source of a row, read by kLanesOfRow lanes; 0: none. Once the first local row of a token has been announced, its
// later rows are copied from there; until then they are fetched as well. So no warp waits.
__device__ uint64_t source_of(const PullBlocks& c, const Arrivals& arrivals, int64_t row, Kept kept, int row_bytes) {
  const bool there = row < kept.count;
  const int token = there ? c.slot_of_row[kept.first + row] / c.top_k : 0;
  unsigned first = ~0u;
  for (int slot = threadIdx.x % kLanesOfRow; slot < c.top_k; slot += kLanesOfRow)
    first = min(first, c.row_of_slot[int64_t{token} * c.top_k + slot] - static_cast<unsigned>(kept.first));
  for (int bits = kLanesOfRow / 2; bits; bits /= 2) first = min(first, __shfl_xor_sync(~0u, first, bits));
  if (!there || c.state->failed) return 0;
  if (first / kArrivalRows < row / kArrivalRows && has_arrived(arrivals, first / kArrivalRows))
    return reinterpret_cast<uint64_t>(c.out) + first * int64_t{row_bytes};
  const int tokens = static_cast<int>(c.tokens);
  return c.peers.buffers[token / tokens] + c.at + token % tokens * int64_t{row_bytes};
}

// Words of a row by a warp, which has kLoads in each lane under way before it stores one; from nowhere, `fill`.
template <class Word, int kLoads>
__device__ void copy_words(Word* to, const Word* from, int count, Word fill) {
  for (int at = threadIdx.x % 32; at < count; at += 32 * kLoads) {
    Word x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x[i] = from && at + 32 * i < count ? from[at + 32 * i] : fill;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (at + 32 * i < count) to[at + 32 * i] = x[i];
  }
}

// Rows in the order in which a product reads them. A warp copies a stretch of a few rows, whose sources its lanes look
// up together, and counts it as arrived. Consecutive stretches are on different multiprocessors.
template <class Word>
__global__ void __launch_bounds__(kMostThreads, 1)
    pull_blocks_kernel(const __grid_constant__ PullBlocks c, int row_bytes, int pieces, int64_t rows) {
  ptx::let_next_kernel_begin();
  constexpr int kLoads = kStretchBytes / (32 * 16);
  const Kept kept = kept_by(c.firsts, c.peers.rank, c.capacity);
  if (!rows) rows = kept.count;  // no tail
  const Arrivals arrivals{c.arrived, pieces};
  const int stretches = pieces / kPartsOfBlock, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t parts = (rows + kArrivalRows - 1) / kArrivalRows * pieces, step = int64_t{gridDim.x} * kMostWarps;
  for (int64_t part = warp * int64_t{gridDim.x} + blockIdx.x; part < parts; part += step) {
    const int64_t row = part / stretches * kRowsOfWarp;
    const int begin = static_cast<int>(part % stretches) * kStretchBytes, bytes = min(kStretchBytes, row_bytes - begin);
    const uint64_t source = source_of(c, arrivals, row + lane / kLanesOfRow, kept, row_bytes);
    __syncwarp();  // makes announcements that a lane has seen readable by all lanes
    for (int i = 0; i < kRowsOfWarp && row + i < rows; ++i) {
      const uint64_t from = __shfl_sync(~0u, source, i * kLanesOfRow);
      const Word fill = all_bits<Word>(row + i < kept.count);  // its row has no source: the lane has failed
      Word* to = reinterpret_cast<Word*>(reinterpret_cast<uint64_t>(c.out) + (row + i) * row_bytes + begin);
      copy_words<Word, kLoads>(to, reinterpret_cast<const Word*>(from ? from + begin : 0), bytes / sizeof(Word), fill);
    }
    __syncwarp();
    if (lane == 0) tell_arrived(arrivals, row / kArrivalRows);
  }
}

// The location of a slot's row: its rank and row number. Without a row, `rank` is negative.
struct Location {
  int rank, row;
};
__device__ Location locate(const int32_t* firsts, int ranks, int64_t capacity, int row) {
  if (row >= firsts[ranks]) return {-1, 0};
  int rank = 0;
  while (row >= firsts[rank + 1]) ++rank;
  const int local = row - firsts[rank];
  return {local < capacity ? rank : -1, local};
}

// The address of a slot's row as a number; 0 without a row.
template <class T>
__device__ uint64_t address_of(const PeerRows& c, int64_t slot) {
  const Location at = locate(c.firsts, c.peers.ranks, c.capacity, c.row_of_slot[slot]);
  if (at.rank < 0) return 0;
  const int64_t row = c.at_slots ? slot : at.row;
  return c.peers.buffers[c.at_slots ? c.peers.rank : at.rank] + c.at + row * c.columns * sizeof(T);
}

// Adds rows, null for none, which are under way at once.
template <class T, int kVector, int kBatch>
__device__ void add_batch(float (&sum)[kVector], const T* const (&rows)[kBatch], int64_t column, bool inside) {
  Vector<T, kVector> x[kBatch] = {};
#pragma unroll
  for (int i = 0; i < kBatch; ++i)
    if (rows[i] && inside) x[i] = read_vector<T, kVector>(rows[i] + column);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    float values[kVector];
    convert(values, x[i]);
#pragma unroll
    for (int n = 0; n < kVector; ++n) sum[n] += values[n];
  }
}

// Adds the rows of `count` slots, which kBatch divides and whose addresses the lanes have.
template <class T, int kVector, int kBatch>
__device__ void add_rows(float (&sum)[kVector], uint64_t address, int count, int64_t column, bool inside) {
  for (int batch = 0; batch < count; batch += kBatch) {
    const T* rows[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) rows[i] = reinterpret_cast<const T*>(__shfl_sync(~0u, address, batch + i));
    add_batch(sum, rows, column, inside);
  }
}

// Adds those that `there` has a bit for, in the order of the bits; row_at(bit) is the row of one.
template <class T, int kVector, class RowAt>
__device__ void add_rows_there(float (&sums)[kSteps][kVector], unsigned there, int64_t columns, unsigned column_block,
                               const RowAt& row_at) {
  while (there) {
    const T* rows[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i, there &= there - 1) rows[i] = there ? row_at(__ffs(there) - 1) : nullptr;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int64_t column = column_of<kVector>(column_block, step);
      add_batch(sums[step], rows, column, column < columns);
    }
  }
}

// Rounds sums; NaN if the lane has failed.
template <class T, int kVector>
__device__ void write_sums(T* to, float (&sums)[kSteps][kVector], int64_t columns, unsigned column_block, bool failed) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t column = column_of<kVector>(column_block, step);
    if (column >= columns) return;
    if (failed)
      for (float& value : sums[step]) value = __uint_as_float(0x7FFFFFFF);
    store(to + column, sums[step]);
  }
}

// The columns of this warp of a token.
template <class T, int kVector, int kBatch>
__device__ void sum_token(const PeerRows& c, int64_t token, unsigned column_block, bool failed) {
  const int lane = threadIdx.x % 32;
  float sums[kSteps][kVector] = {};
  for (int base = 0; base < c.top_k; base += 32) {
    const int count = c.top_k - base < 32 ? c.top_k - base : 32;
    const uint64_t address = lane < count ? address_of<T>(c, token * c.top_k + base + lane) : 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int64_t column = column_of<kVector>(column_block, step);
      add_rows<T, kVector, kBatch>(sums[step], address, count, column, column < c.columns);
    }
  }
  write_sums(static_cast<T*>(c.out) + token * c.columns, sums, c.columns, column_block, failed);
}

template <class T, int kVector, int kBatch, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads, 1)
    sum_kernel(const __grid_constant__ PeerRows c, unsigned column_blocks) {
  const bool failed = c.state->failed;
  constexpr int kBlockWarps = kBlockThreads / 32;
  const int64_t parts = c.tokens * column_blocks, step = int64_t{gridDim.x} * kBlockWarps;
  for (int64_t part = blockIdx.x * int64_t{kBlockWarps} + threadIdx.x / 32; part < parts; part += step)
    sum_token<T, kVector, kBatch>(c, part / column_blocks, static_cast<unsigned>(part % column_blocks), failed);
}

// The columns of this warp of the sum of a token's rows here, to the rank of the token.
template <class T, int kVector>
__device__ void push_sum(const PushSums& c, Kept kept, int source, int64_t token, unsigned column_block) {
  float sums[kSteps][kVector] = {};
  bool any = false;
  for (int base = 0; base < c.top_k; base += 32) {
    const int slot = base + threadIdx.x % 32;
    const int64_t first = (source * c.tokens + token) * c.top_k;
    const unsigned row = slot < c.top_k ? c.row_of_slot[first + slot] - kept.first : ~0u;
    const unsigned here = __ballot_sync(~0u, row < kept.count);
    const auto row_at = [&](int i) { return static_cast<const T*>(c.source) + __shfl_sync(~0u, row, i) * c.pitch; };
    add_rows_there<T>(sums, here, c.columns, column_block, row_at);
    any |= here != 0;
  }
  T* to = in_buffer<T>(c.peers, source, c.at) + (token * c.peers.ranks + c.peers.rank) * c.columns;
  if (any) write_sums(to, sums, c.columns, column_block, false);
}

// Neighbouring blocks store to different ranks, as the blocks of a pull read from different ranks. If the lane has
// failed, other ranks may still read the stored rows.
template <class T, int kVector, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads, 1)
    push_sums_kernel(const __grid_constant__ PushSums c, unsigned column_blocks, int64_t turns) {
  if (c.state->failed) return;
  const Kept kept = kept_by(c.firsts, c.peers.rank, c.capacity);
  const int64_t parts = c.tokens * column_blocks;
  for (int64_t turn = blockIdx.x; turn < turns; turn += gridDim.x) {
    const int source = static_cast<int>((c.peers.rank + 1 + turn) % c.peers.ranks);
    const int64_t part = turn / c.peers.ranks * (kBlockThreads / 32) + threadIdx.x / 32;
    const auto column_block = static_cast<unsigned>(part % column_blocks);
    if (part < parts) push_sum<T, kVector>(c, kept, source, part / column_blocks, column_block);
  }
}

// The ranks that keep rows of a token, as bits. By a warp.
__device__ unsigned owners_of(const PeerRows& c, int64_t token) {
  unsigned owners = 0;
  for (int slot = threadIdx.x % 32; slot < c.top_k; slot += 32) {
    const Location at = locate(c.firsts, c.peers.ranks, c.capacity, c.row_of_slot[token * c.top_k + slot]);
    if (at.rank >= 0) owners |= 1u << at.rank;
  }
  for (int bits = 16; bits; bits /= 2) owners |= __shfl_xor_sync(~0u, owners, bits);
  return owners;
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(const __grid_constant__ SumParts c) {
  const int64_t token = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (token >= c.tokens) return;
  const T* parts = in_buffer<const T>(c.peers, c.peers.rank, c.at) + token * c.peers.ranks * c.columns;
  float sums[kSteps][kVector] = {};
  const auto part_of = [&](int rank) { return parts + rank * c.columns; };
  add_rows_there<T>(sums, owners_of(c, token), c.columns, blockIdx.y, part_of);
  write_sums(static_cast<T*>(c.out) + token * c.columns, sums, c.columns, blockIdx.y, c.state->failed);
}

// Others may still read their slots where the lane has failed.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ StageRows c) {
  const int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  const auto [first, count] = kept_by(c.firsts, c.peers.rank, c.capacity);
  if (row >= count || (c.slot_of_row && c.state->failed)) return;
  T* to = in_buffer<T>(c.peers, c.peers.rank, c.at) + row * c.columns;
  if (c.slot_of_row) {
    const int64_t slot = c.slot_of_row[first + row];
    to = in_buffer<T>(c.peers, static_cast<int>(slot / c.slots), c.at) + slot % c.slots * c.columns;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t column = column_of<kVector>(blockIdx.y, step);
    if (column < c.columns)
      *reinterpret_cast<Vector<T, kVector>*>(to + column) =
          read_vector<T, kVector>(static_cast<const T*>(c.source) + row * c.pitch + column);
  }
}

// ---- numbers

template <class Number>
__global__ void __launch_bounds__(kThreads) numbers_to_rows_kernel(const __grid_constant__ PeerNumbers c) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const auto [first, count] = kept_by(c.firsts, c.peers.rank, c.capacity);
  Number* out = static_cast<Number*>(c.out);
  if (i >= count && i < c.capacity) out[i] = 0;
  if (i >= c.slots) return;
  const unsigned row = c.row_of_slot[i] - first;
  if (row < count)
    out[row] = c.state->failed ? static_cast<Number>(~Number{}) : in_buffer<Number>(c.peers, c.peers.rank, c.at)[i];
}

template <class Number>
__global__ void __launch_bounds__(kThreads) pull_numbers_kernel(const __grid_constant__ PeerNumbers c) {
  const int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (slot >= c.slots) return;
  const Location at = locate(c.firsts, c.peers.ranks, c.capacity, c.row_of_slot[slot]);
  Number number = 0;
  if (at.rank >= 0) number = in_buffer<const Number>(c.peers, at.rank, c.at)[at.row];
  static_cast<Number*>(c.out)[slot] = c.state->failed ? static_cast<Number>(~Number{}) : number;
}

// ---- launches

// Whether rows can be moved in vectors of 16 bytes.
bool fits(const PeerRows& c, const void* rows, int64_t pitch) {
  return vectors_fit(16 / bytes_of(c.type), {c.columns, pitch}, {rows});
}

dim3 grid_of(const PeerRows& c, int64_t blocks, int vector) {
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(blocks_of(c.columns, 32 * kSteps * vector)), 1};
}

int row_bytes_of(const PeerRows& c) { return static_cast<int>(c.columns * bytes_of(c.type)); }

template <class Word>
void launch_pull(const Pull& c, cudaStream_t stream) {
  const int64_t tokens = blocks_of(c.tokens, kWarps) * c.peers.ranks, tail = c.fill ? blocks_of(c.capacity, kWarps) : 0;
  const int row_words = row_bytes_of(c) / static_cast<int>(sizeof(Word));
  const dim3 grid(static_cast<unsigned>(tokens + tail), static_cast<unsigned>(blocks_of(row_words, 32 * kSteps)));
  pull_kernel<Word><<<grid, kThreads, 0, stream>>>(c, row_words, static_cast<unsigned>(tokens));
}
template <class Word>
void launch_pull_blocks(const PullBlocks& c, cudaStream_t stream) {
  const unsigned blocks = std::min(c.blocks, device_properties(current_device()).multiprocessors);  // all are resident
  const int row_bytes = row_bytes_of(c);
  pull_blocks_kernel<Word>
      <<<blocks, kMostThreads, 0, stream>>>(c, row_bytes, pieces_of_block(c), c.fill ? c.capacity : 0);
}
template <class T, int kVector, int kBatch>
void launch_sum_of(const PullSum& c, cudaStream_t stream) {
  const int64_t column_blocks = blocks_of(c.columns, 32 * kSteps * kVector);
  const auto columns = static_cast<unsigned>(column_blocks);
  const auto all = static_cast<unsigned>(blocks_of(c.tokens * column_blocks, kWarps));
  if (c.blocks) sum_kernel<T, kVector, kBatch, kMostThreads><<<c.blocks, kMostThreads, 0, stream>>>(c, columns);
  else sum_kernel<T, kVector, kBatch, kThreads><<<all, kThreads, 0, stream>>>(c, columns);
}
template <class T, int kVector>
void launch_sum(const PullSum& c, cudaStream_t stream) {
  if (c.top_k % 8 == 0) launch_sum_of<T, kVector, 8>(c, stream);
  else if (c.top_k % 4 == 0) launch_sum_of<T, kVector, 4>(c, stream);
  else if (c.top_k % 2 == 0) launch_sum_of<T, kVector, 2>(c, stream);
  else launch_sum_of<T, kVector, 1>(c, stream);
}
template <class T, int kVector, int kBlockThreads>
void launch_push_of(const PushSums& c, cudaStream_t stream) {
  const auto columns = static_cast<unsigned>(blocks_of(c.columns, 32 * kSteps * kVector));
  const int64_t turns = blocks_of(c.tokens * columns, kBlockThreads / 32) * c.peers.ranks;
  const auto blocks = static_cast<unsigned>(c.blocks ? c.blocks : turns);
  push_sums_kernel<T, kVector, kBlockThreads><<<blocks, kBlockThreads, 0, stream>>>(c, columns, turns);
}
template <class T, int kVector>
void launch_push(const PushSums& c, cudaStream_t stream) {
  c.blocks ? launch_push_of<T, kVector, kMostThreads>(c, stream) : launch_push_of<T, kVector, kThreads>(c, stream);
}
template <class T, int kVector>
void launch_parts(const SumParts& c, cudaStream_t stream) {
  sum_parts_kernel<T, kVector><<<grid_of(c, blocks_of(c.tokens, kWarps), kVector), kThreads, 0, stream>>>(c);
}
template <class T, int kVector>
void launch_stage(const StageRows& c, cudaStream_t stream) {
  const dim3 grid = grid_of(c, blocks_of(c.capacity, kWarps), kVector);
  stage_kernel<T, kVector><<<grid, kThreads, 0, stream>>>(c);
}

unsigned blocks_of_threads(int64_t threads) { return static_cast<unsigned>(blocks_of(threads, kThreads)); }

}  // namespace

void publish(const Publish& c, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  const int64_t wanted = c.ids ? std::clamp<int64_t>(blocks_of(c.most_slots, kSlotsOfBlock), 1, kMostBlocks) : 1;
  const unsigned blocks = static_cast<unsigned>(wanted);
  publish_kernel<<<blocks, kThreads, 0, stream>>>(c);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "signals to ", c.peers.ranks, " ranks");
}

void divide_rows(const DivideRows& c, int device, cudaStream_t stream) {
  FUSIBLE_CHECK(c.experts % c.peers.ranks == 0, "ranks own equally many experts, got ", c.experts, " for ",
                c.peers.ranks);
  const DeviceGuard guard(device);
  divide_kernel<<<1, 32 * kMaxRanks, 0, stream>>>(c);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "rows of ", c.experts, " experts on ", c.peers.ranks, " ranks");
}

void stage_rows(const StageRows& c, int device, cudaStream_t stream) {
  if (!c.capacity || !c.columns) return;
  const DeviceGuard guard(device);
  const bool vectors = fits(c, c.source, c.pitch);
  if (bytes_of(c.type) == 4) vectors ? launch_stage<uint32_t, 4>(c, stream) : launch_stage<uint32_t, 1>(c, stream);
  else vectors ? launch_stage<uint16_t, 8>(c, stream) : launch_stage<uint16_t, 1>(c, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "staging of at most ", c.capacity, " rows, ", c.columns, " columns");
}

void pull(const Pull& c, int device, cudaStream_t stream) {
  if (!c.columns) return;
  const DeviceGuard guard(device);
  if (fits(c, c.out, 0)) launch_pull<uint4>(c, stream);
  else if (bytes_of(c.type) == 4) launch_pull<uint32_t>(c, stream);
  else launch_pull<uint16_t>(c, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "rows of ", c.tokens, " tokens of each of ", c.peers.ranks, " ranks");
}

int pieces_of_block(const PeerRows& c) {
  return kPartsOfBlock * static_cast<int>(blocks_of(c.columns * bytes_of(c.type), kStretchBytes));
}

void pull_blocks(const PullBlocks& c, int device, cudaStream_t stream) {
  FUSIBLE_CHECK(c.blocks > 0, "needs blocks of threads, got ", c.blocks);
  if (!c.columns) return;
  const DeviceGuard guard(device);
  if (fits(c, c.out, 0)) launch_pull_blocks<Vector<uint32_t, 4>>(c, stream);
  else if (bytes_of(c.type) == 4) launch_pull_blocks<uint32_t>(c, stream);
  else launch_pull_blocks<uint16_t>(c, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "blocks of rows of ", c.tokens, " tokens of each of ", c.peers.ranks,
                     " ranks");
}

void pull_sum(const PullSum& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.columns) return;
  const DeviceGuard guard(device);
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    fits(c, c.out, 0) ? launch_sum<T, 16 / sizeof(T)>(c, stream) : launch_sum<T, 1>(c, stream);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "sums of rows of ", c.tokens, " tokens from ", c.peers.ranks, " ranks");
}

void push_sums(const PushSums& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.columns) return;
  const DeviceGuard guard(device);
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    fits(c, c.source, c.pitch) ? launch_push<T, 16 / sizeof(T)>(c, stream) : launch_push<T, 1>(c, stream);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "sums of rows for ", c.tokens, " tokens of each of ", c.peers.ranks, " ranks");
}

void sum_parts(const SumParts& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.columns) return;
  const DeviceGuard guard(device);
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    fits(c, c.out, 0) ? launch_parts<T, 16 / sizeof(T)>(c, stream) : launch_parts<T, 1>(c, stream);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "sums of ", c.peers.ranks, " ranks' parts of ", c.tokens, " tokens");
}

void numbers_to_rows(const PeerNumbers& c, int device, cudaStream_t stream) {
  const int64_t threads = std::max(c.slots, c.capacity);
  if (!threads) return;
  const DeviceGuard guard(device);
  if (c.number_bytes == 8) numbers_to_rows_kernel<uint64_t><<<blocks_of_threads(threads), kThreads, 0, stream>>>(c);
  else numbers_to_rows_kernel<uint32_t><<<blocks_of_threads(threads), kThreads, 0, stream>>>(c);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "numbers of ", c.slots, " slots to rows");
}

void pull_numbers(const PeerNumbers& c, int device, cudaStream_t stream) {
  if (!c.slots) return;
  const DeviceGuard guard(device);
  if (c.number_bytes == 8) pull_numbers_kernel<uint64_t><<<blocks_of_threads(c.slots), kThreads, 0, stream>>>(c);
  else pull_numbers_kernel<uint32_t><<<blocks_of_threads(c.slots), kThreads, 0, stream>>>(c);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "numbers of rows of ", c.slots, " slots");
}

}  // namespace fusible
