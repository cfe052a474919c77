// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "device/gemm/groups.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/vector.cuh"
#include "fusible/tensor_map.h"
#include "kernels/quantize/scale_groups.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Rows {
  char* first;
  int64_t count;
};

// The rows of a group's output; by all threads of a block.
__device__ Rows rows_of(const ScaleGroups& c, int group, int64_t element) {
  if (c.fixed_rows) {
    const int64_t offset =
        c.coordinates
            ? (static_cast<int64_t>(c.coordinates[group].far) << kNearBits | c.coordinates[group].near) * kNearBytes
            : group * c.group_stride * element;
    return {static_cast<char*>(c.out) + offset, c.fixed_rows};
  }
  const int64_t start = rows_before(c.sizes, group, c.tokens);
  return {static_cast<char*>(c.out) + start * c.pitch * element, clamped_size(c.sizes, group, c.tokens - start)};
}

template <class T>
__global__ void __launch_bounds__(kThreads) scale_groups_kernel(const ScaleGroups c) {
  constexpr int kVector = 16 / sizeof(T);
  using V = Vector<T, kVector>;
  const int group = blockIdx.y, lane = threadIdx.x % 32;
  const float beta = c.betas ? c.betas[group] : c.beta;
  if (beta == 1.f) return;
  const Rows rows = rows_of(c, group, sizeof(T));
  for (int64_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows.count; row += gridDim.x * kWarps) {
    auto* vectors = reinterpret_cast<V*>(rows.first + row * c.pitch * static_cast<int64_t>(sizeof(T)));
    for (int64_t i = lane; i < c.columns / kVector; i += 32) {
      V x{};
      if (beta != 0.f) {
        x = vectors[i];
        for (T& value : x.values) value = static_cast<T>(static_cast<float>(value) * beta);
      }
      vectors[i] = x;
    }
  }
}

}  // namespace

cudaError_t scale_groups(const ScaleGroups& c, int multiprocessors, cudaStream_t stream) {
  const int64_t rows = c.fixed_rows ? c.fixed_rows : std::max<int64_t>(1, c.tokens / c.sizes.groups);
  const int64_t wanted = std::max<int64_t>(1, 8 * multiprocessors / c.sizes.groups),
                blocks = std::min((rows + kWarps - 1) / kWarps, wanted);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(c.sizes.groups));
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    scale_groups_kernel<T><<<grid, kThreads, 0, stream>>>(c);
  });
  return cudaGetLastError();
}

}  // namespace fusible
