// The interface of csrc/device/ptx/warp_mma.cuh, emulated.
#pragma once
#include <algorithm>

#include "ptx.cuh"

namespace fusible::ptx {

template <class T>
DEVICE void warp_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto words = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  uint64_t operands[3][32];
  const uint64_t mine[3] = {words(a[0], a[1]), words(a[2], a[3]), words(b0, b1)};
  for (int i = 0; i < 3; ++i) std::copy_n(emulation::exchange(mine[i], "mma"), 32, operands[i]);
  const auto element = [&](int operand, int lane, int word, int half) {
    const float2 pair = unpack<T>(static_cast<uint32_t>(operands[operand][lane] >> 32 * word));
    return half ? pair.y : pair.x;
  };
  const int lane = emulation::current->lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      c[i] += element(k / 8, row % 8 * 4 + k % 8 / 2, row / 8, k % 2) * element(2, column * 4 + k % 8 / 2, k / 8, k % 2);
  }
}

}  // namespace fusible::ptx
