// The interface of csrc/device/ptx/approx.cuh, emulated.
#pragma once
#include <cmath>

#include "device/ptx/ptx.cuh"

namespace fusible::ptx {

// With .ftz, what is below 2^-126 becomes zero: arguments and results.
DEVICE float without_subnormals(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x; }

DEVICE float exp2_approx(float x) { return without_subnormals(exp2f(without_subnormals(x))); }
DEVICE float reciprocal_approx(float x) { return without_subnormals(1.f / without_subnormals(x)); }
DEVICE float log2_approx(float x) { return log2f(without_subnormals(x)); }
DEVICE float rsqrt_approx(float x) { return 1.f / sqrtf(without_subnormals(x)); }
DEVICE float sqrt_approx(float x) { return sqrtf(without_subnormals(x)); }
DEVICE float sin_approx(float x) { return without_subnormals(sinf(without_subnormals(x))); }
DEVICE float cos_approx(float x) { return cosf(without_subnormals(x)); }
DEVICE float divide_full(float x, float y) {
  return without_subnormals(without_subnormals(x) / without_subnormals(y));
}
DEVICE float max_nan(float x, float y) { return x > y || x != x ? x : y; }
DEVICE float min_nan(float x, float y) { return x < y || x != x ? x : y; }

}  // namespace fusible::ptx
