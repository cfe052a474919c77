// SPDX-License-Identifier: Apache-2.0
// Rows of tokens to the experts, and sums of them back. A warp has a stretch of one token's columns: columns that all
// its slots share are read once, and a sum needs no other warp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "device/ptx/element.cuh"
#include "device/ptx/vector.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_config.h"
#include "fusible/routing.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kSteps = 2;  // vectors of a lane

// body(token, column) for every vector of this lane.
template <int kVector, class Body>
__device__ void each_vector(const RoutedRows& c, Body body) {
  const int64_t token = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (token >= c.tokens) return;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t column = ((blockIdx.y * kSteps + step) * int64_t{32} + threadIdx.x % 32) * kVector;
    if (column < c.columns) body(token, column);
  }
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) permute_kernel(const __grid_constant__ RoutedRows c, bool fill) {
  const int num_rows = *c.num_rows;
  each_vector<kVector>(c, [&](int64_t token, int64_t column) {
    using V = Vector<T, kVector>;
    const V x = read_vector<T, kVector>(static_cast<const T*>(c.source) + token * c.source_pitch + column);
#pragma unroll 8
    for (int slot = 0; slot < c.top_k; ++slot) {
      const int row = __ldg(&c.row_of_slot[token * c.top_k + slot]);
      V* out = reinterpret_cast<V*>(static_cast<T*>(c.out) + row * c.out_pitch + column);
      if (row < num_rows) *out = x;
      else if (fill) *out = V{};
    }
  });
}

// The rows of kBatch slots, which divides their number, are under way at once.
template <class T, int kVector, int kBatch>
__global__ void __launch_bounds__(kThreads) unpermute_kernel(const __grid_constant__ RoutedRows c) {
  const int num_rows = *c.num_rows;
  each_vector<kVector>(c, [&](int64_t token, int64_t column) {
    float sum[kVector] = {};
    for (int first = 0; first < c.top_k; first += kBatch) {
      Vector<T, kVector> x[kBatch];
      bool exists[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = __ldg(&c.row_of_slot[token * c.top_k + first + i]);
        exists[i] = row < num_rows;
        x[i] =
            read_vector<T, kVector>(static_cast<const T*>(c.source) + (exists[i] ? row : 0) * c.source_pitch + column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float values[kVector];
        convert(values, x[i]);
#pragma unroll
        for (int n = 0; n < kVector; ++n) sum[n] += exists[i] ? values[n] : 0.f;
      }
    }
    store(static_cast<T*>(c.out) + token * c.out_pitch + column, sum);
  });
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const float* values, const int32_t* row_of_slot, const int32_t* num_rows, int64_t slots, void* out,
                  DType type) {
  const int64_t slot = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (slot >= slots) return;
  const int row = row_of_slot[slot];
  write_number(out, type, slot, row < *num_rows ? values[row] : 0.f);
}

// Whether rows can be moved in vectors of 16 bytes.
bool fits(const RoutedRows& c) {
  return vectors_fit(16 / bytes_of(c.type), {c.columns, c.source_pitch, c.out_pitch}, {c.source, c.out});
}

dim3 grid_of(const RoutedRows& c, int vector) {
  return {static_cast<unsigned>(blocks_of(c.tokens, kWarps)),
          static_cast<unsigned>(blocks_of(c.columns, 32 * kSteps * vector)), 1};
}

template <class T, int kVector>
void launch_permute(const RoutedRows& c, bool fill, cudaStream_t stream) {
  permute_kernel<T, kVector><<<grid_of(c, kVector), kThreads, 0, stream>>>(c, fill);
}
template <class T, int kVector>
void launch_unpermute(const RoutedRows& c, cudaStream_t stream) {
  const dim3 grid = grid_of(c, kVector);
  if (c.top_k % 8 == 0) unpermute_kernel<T, kVector, 8><<<grid, kThreads, 0, stream>>>(c);
  else if (c.top_k % 4 == 0) unpermute_kernel<T, kVector, 4><<<grid, kThreads, 0, stream>>>(c);
  else if (c.top_k % 2 == 0) unpermute_kernel<T, kVector, 2><<<grid, kThreads, 0, stream>>>(c);
  else unpermute_kernel<T, kVector, 1><<<grid, kThreads, 0, stream>>>(c);
}

}  // namespace

void permute(const RoutedRows& c, bool fill, int device, cudaStream_t stream) {
  if (!c.tokens || !c.columns || !c.top_k) return;
  const DeviceGuard guard(device);
  if (bytes_of(c.type) == 4)
    fits(c) ? launch_permute<uint32_t, 4>(c, fill, stream) : launch_permute<uint32_t, 1>(c, fill, stream);
  else fits(c) ? launch_permute<uint16_t, 8>(c, fill, stream) : launch_permute<uint16_t, 1>(c, fill, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "copying rows of ", c.tokens, " tokens, ", c.columns, " columns, to ", c.top_k,
                     " slots");
}

void unpermute(const RoutedRows& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.columns) return;
  const DeviceGuard guard(device);
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    fits(c) ? launch_unpermute<T, 16 / sizeof(T)>(c, stream) : launch_unpermute<T, 1>(c, stream);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "summing rows of ", c.tokens, " tokens, ", c.columns, " columns, over ",
                     c.top_k, " slots");
}

void gather_slots(const float* values, const int32_t* row_of_slot, const int32_t* num_rows, int64_t slots, void* out,
                  DType type, int device, cudaStream_t stream) {
  if (!slots) return;
  const DeviceGuard guard(device);
  gather_kernel<<<static_cast<unsigned>(blocks_of(slots, kThreads)), kThreads, 0, stream>>>(values, row_of_slot,
                                                                                            num_rows, slots, out, type);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "numbers of ", slots, " slots");
}

}  // namespace fusible
