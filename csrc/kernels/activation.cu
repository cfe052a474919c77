// One warp a row: lanes walk the columns in vectors of 16 bytes, and the sum for a row's scale needs no other warp.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/activation.cuh"
#include "fusible/device.h"
#include "fusible/error.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

// Where the gate of an output column stands in its row; its up stands `block` columns further.
__device__ int64_t gate_column(const Activation& a, int64_t column) {
  return a.gated && column >= a.block ? column / a.block * 2 * a.block + column % a.block : column;
}

// By the curve and the gate that the call asks for; results of 16 bits need no more than the hardware's own functions.
template <class T>
__device__ Inputs inputs_of(const Activation& a, T gate, T up) {
  return a.gated ? inputs<true>(a, static_cast<float>(gate), static_cast<float>(up)) : Inputs{static_cast<float>(gate), 1.f, true, true};
}
template <class T>
__device__ Point point_of(const Activation& a, float x) {
  Point point;
  with_kind(a, [&](auto kind) INLINE { point = evaluate<kind.kCurve, sizeof(T) == 2>(x, a.alpha); });
  return point;
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) forward(const ActivationForward c) {
  using V = Vector<T, kVector>;
  const Activation a = c.activation;
  const int lane = threadIdx.x % 32;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < c.rows; row += gridDim.x * int64_t{kWarps}) {
    const float scale = c.scales.data ? read_number(c.scales.data, c.scales.type, row) : 1.f;
    const T* pre = static_cast<const T*>(c.pre) + row * c.columns * (a.gated ? 2 : 1);
    T* hidden = static_cast<T*>(c.hidden) + row * c.columns;
#pragma unroll 2
    for (int64_t column = lane * kVector; column < c.columns; column += 32 * kVector) {
      const int64_t at = gate_column(a, column);
      const V gate = *reinterpret_cast<const V*>(pre + at), up = *reinterpret_cast<const V*>(pre + at + (a.gated ? a.block : 0));
      V out;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Inputs in = inputs_of(a, gate.values[i], up.values[i]);
        out.values[i] = static_cast<T>(point_of<T>(a, in.gate).value * in.up * scale);
      }
      *reinterpret_cast<V*>(hidden + column) = out;
    }
  }
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) backward(const ActivationBackward c) {
  using V = Vector<T, kVector>;
  const Activation a = c.activation;
  const int lane = threadIdx.x % 32;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < c.rows; row += gridDim.x * int64_t{kWarps}) {
    const float scale = c.scales.data ? read_number(c.scales.data, c.scales.type, row) : 1.f;
    const int64_t wide = row * c.columns * (a.gated ? 2 : 1), narrow = row * c.columns;
    float sum = 0.f;
    for (int64_t column = lane * kVector; column < c.columns; column += 32 * kVector) {
      const int64_t at = wide + gate_column(a, column), beside = at + (a.gated ? a.block : 0);
      const V gate = *reinterpret_cast<const V*>(static_cast<const T*>(c.pre) + at), up = *reinterpret_cast<const V*>(static_cast<const T*>(c.pre) + beside);
      const V grad = *reinterpret_cast<const V*>(static_cast<const T*>(c.dhidden) + narrow + column);
      V dgate, dup, hidden;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Inputs in = inputs_of(a, gate.values[i], up.values[i]);
        const Point p = point_of<T>(a, in.gate);
        const float d = static_cast<float>(grad.values[i]), plain = p.value * in.up;
        sum += d * plain;
        dgate.values[i] = static_cast<T>(in.gate_passes ? d * scale * in.up * p.slope : 0.f);
        dup.values[i] = static_cast<T>(in.up_passes ? d * scale * p.value : 0.f);
        hidden.values[i] = static_cast<T>(plain * scale);
      }
      *reinterpret_cast<V*>(static_cast<T*>(c.dpre) + at) = dgate;
      if (a.gated) *reinterpret_cast<V*>(static_cast<T*>(c.dpre) + beside) = dup;
      if (c.hidden) *reinterpret_cast<V*>(static_cast<T*>(c.hidden) + narrow + column) = hidden;
    }
    if (c.dscales) {
      for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) write_number(c.dscales, c.scales.type, row, sum);
    }
  }
}

// Whether every vector of `count` elements lies within one block and is aligned.
template <class Call>
bool fits(const Call& c, int64_t count, std::initializer_list<const void*> tensors) {
  uintptr_t addresses = 0;
  for (const void* t : tensors) addresses |= reinterpret_cast<uintptr_t>(t);
  return c.columns % count == 0 && (!c.activation.gated || c.activation.block % count == 0) && addresses % 16 == 0;
}

template <class Call>
void launch(void (*kernel)(Call), const Call& c, int device, cudaStream_t stream) {
  if (!c.rows || !c.columns) return;
  const DeviceGuard guard(device);
  const int64_t blocks = std::min<int64_t>((c.rows + kWarps - 1) / kWarps, 8 * device_properties(device).multiprocessors);
  kernel<<<static_cast<int>(blocks), kThreads, 0, stream>>>(c);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "activation of ", c.rows, " rows of ", c.columns, " columns");
}

}  // namespace

void activate(const ActivationForward& c, int device, cudaStream_t stream) {
  const bool wide = c.type == DType::kFloat32, vectors = fits(c, wide ? 4 : 8, {c.pre, c.hidden});
  if (wide) launch(vectors ? forward<float, 4> : forward<float, 1>, c, device, stream);
  else if (c.type == DType::kFloat16) launch(vectors ? forward<__half, 8> : forward<__half, 1>, c, device, stream);
  else launch(vectors ? forward<__nv_bfloat16, 8> : forward<__nv_bfloat16, 1>, c, device, stream);
}

void activate_backward(const ActivationBackward& c, int device, cudaStream_t stream) {
  const bool wide = c.type == DType::kFloat32, vectors = fits(c, wide ? 4 : 8, {c.pre, c.dhidden, c.dpre, c.hidden});
  if (wide) launch(vectors ? backward<float, 4> : backward<float, 1>, c, device, stream);
  else if (c.type == DType::kFloat16) launch(vectors ? backward<__half, 8> : backward<__half, 1>, c, device, stream);
  else launch(vectors ? backward<__nv_bfloat16, 8> : backward<__nv_bfloat16, 1>, c, device, stream);
}

}  // namespace fusible
