// The interface of csrc/device/ptx/float8.cuh, emulated.
#pragma once
#include <cmath>

#include "device/ptx/ptx.cuh"

namespace fusible::ptx {

inline uint32_t e4m3(float x) {
  if (x != x) return 0x7F;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude >= 448.f) return sign | 0x7E;
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // ties to even; 8 to 16, or fewer
  return sign | static_cast<uint32_t>((exponent + 6) * 8 + steps);
}
DEVICE uint32_t pack_e4m3(float low, float high) { return e4m3(low) | e4m3(high) << 8; }
inline float from_e4m3(uint32_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if ((code & 0x7F) == 0x7F) return NAN;
  const float magnitude = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(1.f * fraction, -9);
  return code & 0x80 ? -magnitude : magnitude;
}
DEVICE float2 unpack_e4m3(uint32_t pair) { return {from_e4m3(pair & 0xFF), from_e4m3(pair >> 8 & 0xFF)}; }
DEVICE uint32_t max_u16x2(uint32_t x, uint32_t y) {
  const uint32_t low = max(x & 0xFFFFu, y & 0xFFFFu), high = max(x >> 16, y >> 16);
  return low | high << 16;
}

}  // namespace fusible::ptx
