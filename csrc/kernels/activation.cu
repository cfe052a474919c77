// One warp a row: lanes walk the columns in vectors of 16 bytes, and the sum for a row's scale needs no other warp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "fusible/activation.h"
#include "fusible/device.h"
#include "fusible/error.h"

namespace fusible {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

__device__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

struct Point {
  float value, slope;
};

// The curve and its derivative at x.
__device__ Point evaluate(const Activation& a, float x) {
  switch (a.curve) {
    case Curve::kSilu: {
      const float s = sigmoid(a.alpha * x);
      return {x * s, s * (1.f + a.alpha * x * (1.f - s))};
    }
    case Curve::kGelu: {
      const float cdf = 0.5f * (1.f + erff(x * 0.70710678f));
      return {x * cdf, cdf + x * 0.39894228f * expf(-0.5f * x * x)};
    }
    case Curve::kGeluTanh: {
      const float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
      return {0.5f * x * (1.f + t), 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * 0.79788456f * (1.f + 0.134145f * x * x)};
    }
    case Curve::kRelu: return {x < 0.f ? 0.f : x, x > 0.f ? 1.f : 0.f};
    case Curve::kReluSquared: return x < 0.f ? Point{0.f, 0.f} : Point{x * x, 2.f * x};
    default: {
      const float s = sigmoid(x);
      return {s, s * (1.f - s)};
    }
  }
}

__device__ float read(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::kFloat32: return static_cast<const float*>(data)[i];
    case DType::kFloat16: return static_cast<const __half*>(data)[i];
    default: return static_cast<const __nv_bfloat16*>(data)[i];
  }
}

__device__ void write(void* data, DType type, int64_t i, float x) {
  switch (type) {
    case DType::kFloat32: static_cast<float*>(data)[i] = x; break;
    case DType::kFloat16: static_cast<__half*>(data)[i] = __float2half(x); break;
    default: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(x);
  }
}

// Where the gate of an output column stands in its row; its up stands `block` columns further.
__device__ int64_t gate_column(const Activation& a, int64_t column) {
  return a.gated && column >= a.block ? column / a.block * 2 * a.block + column % a.block : column;
}

// Gate and up at one column as the curve and the product see them, and whether their gradients pass the limits. Written so that
// NaN stays NaN, which fminf and fmaxf would drop.
struct Inputs {
  float gate, up;
  bool gate_passes, up_passes;
};
__device__ Inputs clamp(const Activation& a, float gate, float up) {
  const bool gate_over = gate > a.limit, up_over = fabsf(up) > a.limit;
  const float clamped = up_over ? copysignf(a.limit, up) : up;
  return {gate_over ? a.limit : gate, a.gated ? clamped + a.linear_offset : 1.f, !gate_over, !up_over};
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) forward(const ActivationForward c) {
  using V = Vector<T, kVector>;
  const Activation a = c.activation;
  const int lane = threadIdx.x % 32;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; row < c.rows; row += gridDim.x * int64_t{kWarps}) {
    const float scale = c.scales.data ? read(c.scales.data, c.scales.type, row) : 1.f;
    const T* pre = static_cast<const T*>(c.pre) + row * c.columns * (a.gated ? 2 : 1);
    T* hidden = static_cast<T*>(c.hidden) + row * c.columns;
#pragma unroll 2
    for (int64_t column = lane * kVector; column < c.columns; column += 32 * kVector) {
      const int64_t at = gate_column(a, column);
      const V gate = *reinterpret_cast<const V*>(pre + at), up = *reinterpret_cast<const V*>(pre + at + (a.gated ? a.block : 0));
      V out;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Inputs in = clamp(a, static_cast<float>(gate.values[i]), static_cast<float>(up.values[i]));
        out.values[i] = static_cast<T>(evaluate(a, in.gate).value * in.up * scale);
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
    const float scale = c.scales.data ? read(c.scales.data, c.scales.type, row) : 1.f;
    const int64_t wide = row * c.columns * (a.gated ? 2 : 1), narrow = row * c.columns;
    float sum = 0.f;
    for (int64_t column = lane * kVector; column < c.columns; column += 32 * kVector) {
      const int64_t at = wide + gate_column(a, column), beside = at + (a.gated ? a.block : 0);
      const V gate = *reinterpret_cast<const V*>(static_cast<const T*>(c.pre) + at), up = *reinterpret_cast<const V*>(static_cast<const T*>(c.pre) + beside);
      const V grad = *reinterpret_cast<const V*>(static_cast<const T*>(c.dhidden) + narrow + column);
      V dgate, dup, hidden;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Inputs in = clamp(a, static_cast<float>(gate.values[i]), static_cast<float>(up.values[i]));
        const Point p = evaluate(a, in.gate);
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
      if (lane == 0) write(c.dscales, c.scales.type, row, sum);
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
