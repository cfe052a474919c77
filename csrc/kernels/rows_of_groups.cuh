// How many rows belong to groups.
#pragma once
#include "fusible/clearing.h"

namespace fusible {

// Rows of all groups together, at most `tokens`; every thread of the block gets it. Sizes below zero count as zero.
__device__ inline int64_t rows_of_groups(const SplitSizes& s, int64_t tokens) {
  __shared__ unsigned long long total;
  __syncthreads();  // all have read that of an earlier call
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int g = threadIdx.x; g < s.groups; g += blockDim.x) {
    const int64_t size = s.wide ? static_cast<const int64_t*>(s.sizes)[g] : static_cast<const int32_t*>(s.sizes)[g];
    mine += size < 0 ? 0 : size < tokens ? size : tokens;  // cut off here, so that no sum can overflow
  }
  atomicAdd(&total, mine);  // integers: the order does not matter
  __syncthreads();
  return total < static_cast<unsigned long long>(tokens) ? static_cast<int64_t>(total) : tokens;
}

}  // namespace fusible
