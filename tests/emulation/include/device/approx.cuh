// The interface of csrc/device/approx.cuh, emulated.
#pragma once
#include <cmath>

#include "device/ptx.cuh"

namespace fusible::ptx {

DEVICE float exp2_approx(float x) { return exp2f(x); }
DEVICE float reciprocal_approx(float x) { return 1.f / x; }
DEVICE float log2_approx(float x) { return log2f(x); }
DEVICE float rsqrt_approx(float x) { return 1.f / sqrtf(x); }
DEVICE float sqrt_approx(float x) { return sqrtf(x); }
DEVICE float sin_approx(float x) { return sinf(x); }
DEVICE float cos_approx(float x) { return cosf(x); }
DEVICE float divide_full(float x, float y) { return x / y; }
DEVICE float max_nan(float x, float y) { return x > y || x != x ? x : y; }
DEVICE float min_nan(float x, float y) { return x < y || x != x ? x : y; }

}  // namespace fusible::ptx
