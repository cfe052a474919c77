// SPDX-License-Identifier: Apache-2.0
// Written by `python -m emulation.curves`, run in tests, from ops/programs/activations.py: the curves of the built-in
// activations, of one constant, the slope inside silu. Functions: see device/functions/pointwise.cuh.
// clang-format off
#pragma once
#include "device/functions/pointwise.cuh"
#include "fusible/activation_kind.h"

namespace fusible {

template <bool kFast>
struct Silu {
  using M = Math<kFast>;
  static constexpr bool kGated = false;
  static constexpr int kRows = 0, kColumns = 0;
  static constexpr int kMatrices = 0, kConstants = 1, kVectors = 2;
  DEVICE static float forward(float x, float u, const float* r) {
    const float t0 = M::sigmoid(x, r[0]);
    const float t1 = t0 * x;
    return t1;
  }
  DEVICE static Gradients<0> backward(float x, float u, const float* r, float dy) {
    const float t0 = M::sigmoid(x, r[0]);
    const float t1 = t0 * x;
    const float t2 = r[0] * t1;
    const float t3 = 0x1.0000000000000p+0f - t0;
    const float t4 = t2 * t3;
    const float t5 = t0 + t4;
    const float t6 = dy * t5;
    return {t1, t6, 0x0.0p+0f, {}};
  }
};

template <bool kFast>
struct Gelu {
  using M = Math<kFast>;
  static constexpr bool kGated = false;
  static constexpr int kRows = 0, kColumns = 0;
  static constexpr int kMatrices = 0, kConstants = 1, kVectors = 1;
  DEVICE static float forward(float x, float u, const float* r) {
    const float t0 = x * 0x1.6a09e60000000p-1f;
    const float t1 = erff(t0);
    const float t2 = t1 * 0x1.0000000000000p-1f;
    const float t3 = t2 + 0x1.0000000000000p-1f;
    const float t4 = t3 * x;
    return t4;
  }
  DEVICE static Gradients<0> backward(float x, float u, const float* r, float dy) {
    const float t0 = x * 0x1.6a09e60000000p-1f;
    const float t1 = erff(t0);
    const float t2 = t1 * 0x1.0000000000000p-1f;
    const float t3 = t2 + 0x1.0000000000000p-1f;
    const float t4 = x * x;
    const float t5 = M::exp(t4, -0x1.0000000000000p-1f);
    const float t6 = t5 * 0x1.9884540000000p-2f;
    const float t7 = t3 * x;
    const float t8 = t6 * x;
    const float t9 = t3 + t8;
    const float t10 = dy * t9;
    return {t7, t10, 0x0.0p+0f, {}};
  }
};

template <bool kFast>
struct GeluTanh {
  using M = Math<kFast>;
  static constexpr bool kGated = false;
  static constexpr int kRows = 0, kColumns = 0;
  static constexpr int kMatrices = 0, kConstants = 1, kVectors = 1;
  DEVICE static float forward(float x, float u, const float* r) {
    const float t0 = x * x;
    const float t1 = t0 * 0x1.6e4e260000000p-5f;
    const float t2 = t1 + 0x1.0000000000000p+0f;
    const float t3 = t2 * x;
    const float t4 = M::sigmoid(t3, 0x1.9884540000000p+0f);
    const float t5 = t4 * x;
    return t5;
  }
  DEVICE static Gradients<0> backward(float x, float u, const float* r, float dy) {
    const float t0 = x * x;
    const float t1 = t0 * 0x1.6e4e260000000p-5f;
    const float t2 = t1 + 0x1.0000000000000p+0f;
    const float t3 = t2 * x;
    const float t4 = M::sigmoid(t3, 0x1.9884540000000p+0f);
    const float t5 = t0 * 0x1.b6676c0000000p-3f;
    const float t6 = t5 + 0x1.9884540000000p+0f;
    const float t7 = t4 * x;
    const float t8 = 0x1.0000000000000p+0f - t4;
    const float t9 = t7 * t8;
    const float t10 = t9 * t6;
    const float t11 = t10 + t4;
    const float t12 = dy * t11;
    return {t7, t12, 0x0.0p+0f, {}};
  }
};

template <bool kFast>
struct Relu {
  using M = Math<kFast>;
  static constexpr bool kGated = false;
  static constexpr int kRows = 0, kColumns = 0;
  static constexpr int kMatrices = 0, kConstants = 1, kVectors = 1;
  DEVICE static float forward(float x, float u, const float* r) {
    const float t0 = ptx::max_nan(x, 0x0.0p+0f);
    return t0;
  }
  DEVICE static Gradients<0> backward(float x, float u, const float* r, float dy) {
    const float t0 = ptx::max_nan(x, 0x0.0p+0f);
    const bool t1 = t0 <= 0x0.0p+0f;
    const float t2 = t1 ? 0x0.0p+0f : dy;
    return {t0, t2, 0x0.0p+0f, {}};
  }
};

template <bool kFast>
struct Relu2 {
  using M = Math<kFast>;
  static constexpr bool kGated = false;
  static constexpr int kRows = 0, kColumns = 0;
  static constexpr int kMatrices = 0, kConstants = 1, kVectors = 1;
  DEVICE static float forward(float x, float u, const float* r) {
    const float t0 = ptx::max_nan(x, 0x0.0p+0f);
    const float t1 = t0 * t0;
    return t1;
  }
  DEVICE static Gradients<0> backward(float x, float u, const float* r, float dy) {
    const float t0 = ptx::max_nan(x, 0x0.0p+0f);
    const float t1 = t0 * t0;
    const float t2 = t0 * 0x1.0000000000000p+1f;
    const float t3 = dy * t2;
    return {t1, t3, 0x0.0p+0f, {}};
  }
};

template <bool kFast>
struct Sigmoid {
  using M = Math<kFast>;
  static constexpr bool kGated = false;
  static constexpr int kRows = 0, kColumns = 0;
  static constexpr int kMatrices = 0, kConstants = 1, kVectors = 1;
  DEVICE static float forward(float x, float u, const float* r) {
    const float t0 = M::sigmoid(x);
    return t0;
  }
  DEVICE static Gradients<0> backward(float x, float u, const float* r, float dy) {
    const float t0 = M::sigmoid(x);
    const float t1 = 0x1.0000000000000p+0f - t0;
    const float t2 = t0 * t1;
    const float t3 = dy * t2;
    return {t0, t3, 0x0.0p+0f, {}};
  }
};

// body(curve).
template <bool kFast, class Body>
DEVICE void with_curve(Curve curve, Body body) {
  switch (curve) {
    case Curve::kSilu: return body(Silu<kFast>());
    case Curve::kGelu: return body(Gelu<kFast>());
    case Curve::kGeluTanh: return body(GeluTanh<kFast>());
    case Curve::kRelu: return body(Relu<kFast>());
    case Curve::kRelu2: return body(Relu2<kFast>());
    case Curve::kSigmoid: return body(Sigmoid<kFast>());
  }
}
static_assert(Curve::kSilu == Curve{0} && Curve::kGelu == Curve{1} && Curve::kGeluTanh == Curve{2} && Curve::kRelu == Curve{3} && Curve::kRelu2 == Curve{4} && Curve::kSigmoid == Curve{5}, "the order of Python's table");

}  // namespace fusible
