// SPDX-License-Identifier: Apache-2.0
// Split sizes on the device: the only code that reads, clamps, sums and reports them.
#pragma once
#include "device/ptx/ptx.cuh"
#include "fusible/groups.h"
#include "fusible/wrong_size.h"

namespace fusible {

// An element of an array of int32 or int64.
DEVICE int64_t read_index(const void* array, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

template <class Int>
DEVICE Int clamp_size(int64_t size, Int most) {
  return static_cast<Int>(size < 0 ? 0 : size < most ? size : most);
}

// The size of a group, clamped to 0 … `most`; 0 for a group that does not exist.
template <class Int>
DEVICE Int clamped_size(const SplitSizes& s, int group, Int most) {
  if (group >= s.groups) return 0;
  return clamp_size(read_index(s.sizes, s.int64_sizes, group), most);
}

// Inclusive prefix sum over the warp, of what `add` makes of two neighbours.
template <class T, class Add>
DEVICE T scan(T x, int lane, Add add) {
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(~0u, x, offset);
    if (lane >= offset) x = add(x, other);
  }
  return x;
}
template <class T>
DEVICE T scan(T x, int lane) {
  return scan(x, lane, [](T a, T b) { return a + b; });
}

// The rows of a group in a buffer; `cut`: its size is another.
template <class Int>
struct GroupRows {
  Int start, size;
  bool cut;
};

// Never zero.
DEVICE uint64_t word_of(const WrongSize& wrong) {
  constexpr int64_t kMost = WrongSize::kMost;
  const int64_t saturated = wrong.size > kMost ? kMost : wrong.size < -kMost ? -kMost : wrong.size;
  return uint64_t{1} << 63 | static_cast<uint64_t>(wrong.sizes) << 62 |
         static_cast<uint64_t>(wrong.group) << WrongSize::kSizeBits |
         (static_cast<uint64_t>(saturated) & ((uint64_t{1} << WrongSize::kSizeBits) - 1));
}

// Tells the host, which reads the word at any time. The first report stays until then.
DEVICE void report(uint64_t* to, const WrongSize& wrong) {
  auto* word = static_cast<volatile uint64_t*>(to);  // past all caches, and whole
  if (word && *word == 0) *word = word_of(wrong);
}

// Reports the first of 32 neighbouring groups that was cut. Called by one warp of one block.
template <class Int>
DEVICE void report_cut(const SplitSizes& s, int group, const GroupRows<Int>& rows, int lane) {
  const unsigned cut = __ballot_sync(~0u, rows.cut);
  if (cut && lane == __ffs(cut) - 1)
    report(s.wrong, {SizesOf::kRows, group, read_index(s.sizes, s.int64_sizes, group)});
}

// The rows of this lane's group, of 32 neighbouring ones, clamped to a buffer of `rows`. `before`, the rows before the
// 32 groups, is advanced past them. Called by one warp.
template <class Int>
DEVICE GroupRows<Int> rows_of_lane(const SplitSizes& s, int group, Int rows, Int& before, int lane) {
  // 32-bit sums saturate, so they cannot overflow; 64-bit sums of 32 clamped sizes cannot overflow anyway.
  const auto add = [&](Int a, Int b) { return sizeof(Int) == 8 ? a + b : min(a, rows - b) + b; };
  const int64_t size = group < s.groups ? read_index(s.sizes, s.int64_sizes, group) : 0;
  const Int sum = scan(clamp_size(size, rows), lane, add), end = before + min(sum, rows - before);
  Int start = __shfl_up_sync(~0u, end, 1);
  if (lane == 0) start = before;
  before = __shfl_sync(~0u, end, 31);
  return {start, end - start, end - start != size};
}

// Reports the first of all groups that was cut. By one warp.
DEVICE void report_cut(const SplitSizes& s, int64_t rows, int lane) {
  int64_t before = 0;
  for (int base = 0; base < s.groups; base += 32)
    report_cut(s, base + lane, rows_of_lane(s, base + lane, rows, before, lane), lane);
}

// Rows of the groups before number `group`, at most `rows`. Called by all threads of a block, and returned to each. The
// first block reports invalid sizes of any group.
__device__ inline int64_t rows_before(const SplitSizes& s, int group, int64_t rows) {
  __shared__ unsigned long long total;
  __shared__ bool negative;
  __syncthreads();  // all have read the value of an earlier call
  if (threadIdx.x == 0) total = 0, negative = false;
  __syncthreads();
  unsigned long long mine = 0;
  for (int g = threadIdx.x; g < group; g += blockDim.x) {
    const int64_t size = read_index(s.sizes, s.int64_sizes, g);
    mine += clamp_size(size, rows);
    if (size < 0) negative = true;
  }
  atomicAdd(&total, mine);  // integers: the order does not matter
  __syncthreads();
  const bool wrong = negative || total > static_cast<unsigned long long>(rows);
  if (wrong && group == s.groups && blockIdx.x == 0 && threadIdx.x < 32) report_cut(s, rows, threadIdx.x);
  return total < static_cast<unsigned long long>(rows) ? static_cast<int64_t>(total) : rows;
}

}  // namespace fusible
