// SPDX-License-Identifier: Apache-2.0
// Zeroes counters, and the rows of token buffers that belong to no group: those past the last one.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/gemm/groups.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/overlapping_launch.h"
#include "fusible/zeroing.h"

namespace fusible {
namespace {

constexpr int kThreads = 256;

// The work of one zeroing launch.
struct Piece {
  static constexpr int kCounters = 16, kTails = 4;
  Counters counters[kCounters];
  Tail tails[kTails];
  int counter_count, tail_count;
};

template <class Element>
__device__ void zero_rows(const BufferRows& r, int64_t first) {
  const int64_t width = r.row_bytes / sizeof(Element), pitch = r.pitch_bytes / sizeof(Element),
                count = (r.tokens - first) * width;
  auto* rows = static_cast<Element*>(r.data);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += gridDim.x * int64_t{kThreads})
    rows[(first + i / width) * pitch + i % width] = Element{};
}

__device__ bool aligned(const BufferRows& r, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(r.data) | r.row_bytes | r.pitch_bytes) % bytes == 0;
}

__global__ void __launch_bounds__(kThreads) zero_kernel(const __grid_constant__ Piece p) {
  ptx::let_next_kernel_begin();
  ptx::wait_for_earlier_kernels();
  if (blockIdx.x == 0)
    for (int i = 0; i < p.counter_count; ++i)
      for (int at = threadIdx.x; at < p.counters[i].count; at += kThreads) p.counters[i].first[at] = 0;
  for (int i = 0; i < p.tail_count; ++i) {
    const Tail& tail = p.tails[i];
    const int64_t first = rows_before(tail.sizes, tail.sizes.groups, tail.rows.tokens);
    if (aligned(tail.rows, 16)) zero_rows<uint4>(tail.rows, first);
    else if (aligned(tail.rows, 4)) zero_rows<uint32_t>(tail.rows, first);
    else if (aligned(tail.rows, 2)) zero_rows<uint16_t>(tail.rows, first);
    else zero_rows<uint8_t>(tail.rows, first);
  }
}

template <class T, class Array>
int take(const std::vector<T>& all, size_t first, Array& taken) {
  const size_t count = std::min(all.size() - std::min(first, all.size()), std::size(taken));
  std::copy_n(all.begin() + std::min(first, all.size()), count, taken);
  return static_cast<int>(count);
}

}  // namespace

void zero(const Zeroing& zeroing, int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  for (size_t i = 0; i * Piece::kCounters < zeroing.counters.size() || i * Piece::kTails < zeroing.tails.size(); ++i) {
    Piece piece;
    piece.counter_count = take(zeroing.counters, i * Piece::kCounters, piece.counters);
    piece.tail_count = take(zeroing.tails, i * Piece::kTails, piece.tails);
    int64_t most = 1;
    for (int t = 0; t < piece.tail_count; ++t)
      most = std::max(most, piece.tails[t].rows.tokens * piece.tails[t].rows.row_bytes / 16 / kThreads + 1);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(most, 2 * device_properties(device).multiprocessors));
    FUSIBLE_CUDA_CHECK(
        launch_overlapping(reinterpret_cast<const void*>(&zero_kernel), blocks, kThreads, 0, stream, piece), "zeroing ",
        piece.counter_count, " counters and ", piece.tail_count, " tails");
  }
}

}  // namespace fusible
