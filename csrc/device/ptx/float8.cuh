// SPDX-License-Identifier: Apache-2.0
// Conversion to and from e4m3, and comparisons of magnitudes as bits, by the hardware.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible::ptx {

// Two floats, the first in the low byte: rounded to nearest even, saturated to 448; NaN is 0x7F.
DEVICE uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// The inverse, exactly.
DEVICE float2 unpack_e4m3(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return __half22float2(reinterpret_cast<const __half2&>(halves));
}
// The maximum of each half, as unsigned integers.
DEVICE uint32_t max_u16x2(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

}  // namespace fusible::ptx
