// SPDX-License-Identifier: Apache-2.0
// Elementary functions and comparisons of the hardware, of one instruction each.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible::ptx {

#define FUSIBLE_APPROX(name, instruction)                          \
  DEVICE float name(float x) {                                     \
    float y;                                                       \
    asm(instruction ".approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                                      \
  }
FUSIBLE_APPROX(exp2_approx, "ex2")
FUSIBLE_APPROX(reciprocal_approx, "rcp")
FUSIBLE_APPROX(log2_approx, "lg2")
FUSIBLE_APPROX(rsqrt_approx, "rsqrt")
FUSIBLE_APPROX(sqrt_approx, "sqrt")
FUSIBLE_APPROX(sin_approx, "sin")
FUSIBLE_APPROX(cos_approx, "cos")
#undef FUSIBLE_APPROX

// Right to 2 units in the last place, whatever the sizes of x and y.
DEVICE float divide_full(float x, float y) {
  float z;
  asm("div.full.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
// NaN where either is.
DEVICE float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
DEVICE float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace fusible::ptx
