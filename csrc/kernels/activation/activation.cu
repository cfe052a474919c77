// SPDX-License-Identifier: Apache-2.0
// One warp a row: lanes walk the columns in vectors of 16 bytes, and the sum for a row's scale needs no other warp.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/functions/activation.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/vector.cuh"
#include "device/rows/rows.cuh"
#include "fusible/activation.h"
#include "fusible/device.h"
#include "fusible/error.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kBlocksPerMultiprocessor = 4;

// The loops over rows are compiled for each function, so that nothing is decided for each element. For fp32 rows
// functions are exact.
template <class T, class Body>
DEVICE void with_form(const Activation& a, Body body) {
  constexpr bool kFast = sizeof(T) == 2;
  if (a.gated) with_function<kFast>(a, [&](auto function) INLINE { body(function, std::true_type()); });
  else with_unlimited_function<kFast>(a, [&](auto function) INLINE { body(function, std::false_type()); });
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    forward(const __grid_constant__ ActivationForward c) {
  const Activation& a = c.activation;
  const unsigned columns = static_cast<unsigned>(c.columns), block = static_cast<unsigned>(a.block),
                 first = threadIdx.x % 32 * kVector;
  with_form<T>(a, [&](auto function, auto is_gated) INLINE {
    constexpr bool gated = is_gated.value;
    each_row_of_warp<kWarps>(c.rows, [&](int64_t row) INLINE {
      const float scale = c.scales.data ? read_number(c.scales.data, c.scales.type, row) : 1.f;
      const T* preact = static_cast<const T*>(c.preact) + row * columns * (gated ? 2 : 1);
      T* postact = static_cast<T*>(c.postact) + row * columns;
#pragma unroll 2
      for (unsigned column = first; column < columns; column += 32 * kVector) {
        float gate[kVector], up[kVector], out[kVector];
        const unsigned at = gated ? gate_column(column, block) : column;
        load(gate, preact + at);
        if constexpr (gated) load(up, preact + at + block);
#pragma unroll
        for (int i = 0; i < kVector; ++i) out[i] = function.forward(gate[i], gated ? up[i] : 1.f, &scale);
        store(postact + column, out);
      }
    });
  });
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward(const __grid_constant__ ActivationBackward c) {
  const Activation& a = c.activation;
  const unsigned columns = static_cast<unsigned>(c.columns), block = static_cast<unsigned>(a.block),
                 lane = threadIdx.x % 32;
  with_form<T>(a, [&](auto function, auto is_gated) INLINE {
    constexpr bool gated = is_gated.value;
    each_row_of_warp<kWarps>(c.rows, [&](int64_t row) INLINE {
      const float scale = c.scales.data ? read_number(c.scales.data, c.scales.type, row) : 1.f;
      const int64_t wide = row * columns * (gated ? 2 : 1), narrow = row * columns;
      const T *preact = static_cast<const T*>(c.preact) + wide, *dpostact = static_cast<const T*>(c.dpostact) + narrow;
      T *dpreact = static_cast<T*>(c.dpreact) + wide, *postact = static_cast<T*>(c.postact) + narrow;
      float sum = 0.f;
      for (unsigned column = lane * kVector; column < columns; column += 32 * kVector) {
        float gate[kVector], up[kVector], grad[kVector];
        const unsigned at = gated ? gate_column(column, block) : column;
        load(gate, preact + at);
        if constexpr (gated) load(up, preact + at + block);
        load(grad, dpostact + column);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const auto d = function.backward(gate[i], gated ? up[i] : 1.f, &scale, grad[i]);
          sum += d.dr[0];
          gate[i] = d.dx, up[i] = d.du, grad[i] = d.y;
        }
        store(dpreact + at, gate);
        if constexpr (gated) store(dpreact + at + block, up);
        if (c.postact) store(postact + column, grad);
      }
      if (c.dscales) {
        for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (lane == 0) write_number(c.dscales, c.scales.type, row, sum);
      }
    });
  });
}

// Whether every vector lies within one block and is aligned.
template <class Call>
bool fits(const Call& c, std::initializer_list<const void*> tensors) {
  return vectors_fit(16 / bytes_of(c.type), {c.columns, c.activation.gated ? c.activation.block : 0}, tensors);
}

template <class Call>
void launch(void (*kernel)(Call), const Call& c, int device, cudaStream_t stream) {
  if (!c.rows || !c.columns) return;
  const DeviceGuard guard(device);
  const int64_t blocks = std::min<int64_t>((c.rows + kWarps - 1) / kWarps,
                                           2 * kBlocksPerMultiprocessor * device_properties(device).multiprocessors);
  kernel<<<static_cast<int>(blocks), kThreads, 0, stream>>>(c);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "activation of ", c.rows, " rows of ", c.columns, " columns");
}

}  // namespace

void activate(const ActivationForward& c, int device, cudaStream_t stream) {
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    launch(fits(c, {c.preact, c.postact}) ? forward<T, 16 / sizeof(T)> : forward<T, 1>, c, device, stream);
  });
}

void activate_backward(const ActivationBackward& c, int device, cudaStream_t stream) {
  dispatch_dtype(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    launch(fits(c, {c.preact, c.dpostact, c.dpreact, c.postact}) ? backward<T, 16 / sizeof(T)> : backward<T, 1>, c,
           device, stream);
  });
}

}  // namespace fusible
