// Zeroes the rows of a token buffer that belong to no group: those past the last one.
#include <cuda_runtime.h>

#include <algorithm>

#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/zero_tail.h"

namespace fusible {
namespace {

constexpr int kThreads = 256;

// Rows of all groups together, at most `tokens`; every thread of the block gets it. Sizes below zero count as zero.
template <class Size>
__device__ int64_t rows_of_groups(const Size* sizes, int groups, int64_t tokens) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int g = threadIdx.x; g < groups; g += kThreads) {
    const int64_t size = sizes[g];
    mine += size < 0 ? 0 : size < tokens ? size : tokens;  // cut off here, so that no sum can overflow
  }
  atomicAdd(&total, mine);  // integers: the order does not matter
  __syncthreads();
  return total < static_cast<unsigned long long>(tokens) ? static_cast<int64_t>(total) : tokens;
}

// Rows of `width` elements, `pitch` elements apart.
template <class Size, class Element>
__global__ void __launch_bounds__(kThreads) zero_tail_kernel(Element* rows, int64_t tokens, int64_t width, int64_t pitch, const Size* sizes, int groups) {
  const int64_t first = rows_of_groups(sizes, groups, tokens), count = (tokens - first) * width;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += gridDim.x * int64_t{kThreads})
    rows[(first + i / width) * pitch + i % width] = Element{};
}

template <class Element>
void launch(const TokenRows& r, const SplitSizes& s, int blocks, cudaStream_t stream) {
  constexpr int64_t kBytes = sizeof(Element);
  auto* rows = static_cast<Element*>(r.data);
  const int64_t width = r.row_bytes / kBytes, pitch = r.pitch_bytes / kBytes;
  if (s.wide) zero_tail_kernel<<<blocks, kThreads, 0, stream>>>(rows, r.tokens, width, pitch, static_cast<const int64_t*>(s.sizes), s.groups);
  else zero_tail_kernel<<<blocks, kThreads, 0, stream>>>(rows, r.tokens, width, pitch, static_cast<const int32_t*>(s.sizes), s.groups);
}

bool aligned(const TokenRows& r, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(r.data) | r.row_bytes | r.pitch_bytes) % bytes == 0;
}

}  // namespace

void zero_tail(const TokenRows& r, const SplitSizes& s, int device, cudaStream_t stream) {
  if (!r.tokens || !r.row_bytes) return;
  const DeviceGuard guard(device);
  const int64_t work = (r.tokens * r.row_bytes / 16 + kThreads - 1) / kThreads;
  const int blocks = static_cast<int>(std::clamp<int64_t>(work, 1, 2 * device_properties(device).multiprocessors));
  if (aligned(r, 16)) launch<uint4>(r, s, blocks, stream);
  else if (aligned(r, 4)) launch<uint32_t>(r, s, blocks, stream);
  else if (aligned(r, 2)) launch<uint16_t>(r, s, blocks, stream);
  else launch<uint8_t>(r, s, blocks, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "zero_tail of ", r.tokens, " rows of ", r.row_bytes, " bytes, ", s.groups, " groups");
}

}  // namespace fusible
