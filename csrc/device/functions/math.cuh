// SPDX-License-Identifier: Apache-2.0
// The elementary functions of pointwise programs. kFast: by the hardware's approximations, right to some 2^-18, for
// results that are rounded to 16 bits. A factor of the argument that is the same for all elements costs nothing.
#pragma once
#include "device/ptx/approx.cuh"

namespace fusible {

template <bool kFast>
struct Math {
  DEVICE static float exp(float x, float factor = 1.f) { return expf(factor * x); }
  DEVICE static float expm1(float x) { return expm1f(x); }
  DEVICE static float log(float x) { return logf(x); }
  DEVICE static float log1p(float x) { return log1pf(x); }
  DEVICE static float sigmoid(float x, float factor = 1.f) { return 1.f / (1.f + expf(-factor * x)); }
  DEVICE static float tanh(float x) { return tanhf(x); }
  DEVICE static float sqrt(float x) { return sqrtf(x); }
  DEVICE static float rsqrt(float x) { return 1.f / sqrtf(x); }
  DEVICE static float reciprocal(float x) { return 1.f / x; }
  DEVICE static float divide(float x, float y) { return x / y; }
  DEVICE static float sin(float x) { return sinf(x); }
  DEVICE static float cos(float x) { return cosf(x); }
};

template <>
struct Math<true> {
  DEVICE static float exp(float x, float factor = 1.f) { return ptx::exp2_approx(1.44269504f * factor * x); }
  DEVICE static float sigmoid(float x, float factor = 1.f) {
    return ptx::reciprocal_approx(1.f + ptx::exp2_approx(-1.44269504f * factor * x));
  }
  // The next four take their series where the hardware's function would lose digits.
  DEVICE static float expm1(float x) {
    const float large = exp(x) - 1.f;
    const float small = x * (1.f + x * (0.5f + x * (0.16666667f + x * (0.041666667f + x * 0.0083333333f))));
    return fabsf(x) < 0.1f ? small : large;
  }
  DEVICE static float log1p(float x) {
    const float large = 0.69314718f * ptx::log2_approx(1.f + x);
    return fabsf(x) < 0.06f ? log1p_series(x) : large;
  }
  DEVICE static float log(float x) {
    const float large = 0.69314718f * ptx::log2_approx(x);
    return fabsf(x - 1.f) < 0.06f ? log1p_series(x - 1.f) : large;
  }
  DEVICE static float tanh(float x) {
    const float large = 1.f - 2.f * ptx::reciprocal_approx(1.f + ptx::exp2_approx(2.88539008f * fabsf(x)));
    const float s = x * x;
    const float small = x + x * s * (-0.33333333f + s * (0.13333333f + s * (-0.05396825f + s * 0.02186949f)));
    return fabsf(x) < 0.3f ? small : copysignf(large, x);
  }
  DEVICE static float sqrt(float x) { return ptx::sqrt_approx(x); }
  DEVICE static float rsqrt(float x) { return ptx::rsqrt_approx(x); }
  DEVICE static float reciprocal(float x) { return ptx::reciprocal_approx(x); }
  DEVICE static float divide(float x, float y) { return ptx::divide_full(x, y); }
  DEVICE static float sin(float x) { return ptx::sin_approx(within_a_turn(x)); }
  DEVICE static float cos(float x) { return ptx::cos_approx(within_a_turn(x)); }

 private:
  DEVICE static float log1p_series(float x) {
    return x * (1.f + x * (-0.5f + x * (0.33333333f + x * (-0.25f + x * 0.2f))));
  }
  // Within [-pi, pi], where the hardware's sine is right to 2^-21. A turn is subtracted in two parts: it has more
  // digits than a float.
  DEVICE static float within_a_turn(float x) {
    const float turns = rintf(x * 0.15915494f);
    return fmaf(-turns, -1.7484556e-7f, fmaf(-turns, 6.2831855f, x));
  }
};

}  // namespace fusible
