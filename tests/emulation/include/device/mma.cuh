// The interface of csrc/device/mma.cuh, emulated.
#pragma once
#include "device/ptx.cuh"

namespace fusible::ptx {

DEVICE void multiply_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  uint64_t words[3][32];  // of all lanes: a[0] and a[1], a[2] and a[3], b
  const uint64_t mine[3] = {a[0] | static_cast<uint64_t>(a[1]) << 32, a[2] | static_cast<uint64_t>(a[3]) << 32,
                            b[0] | static_cast<uint64_t>(b[1]) << 32};
  for (int i = 0; i < 3; ++i) std::memcpy(words[i], emulation::exchange(mine[i], "mma"), sizeof words[i]);
  const int lane = emulation::current->lane();
  const auto half = [](uint64_t word, int i) { return unpack<__nv_bfloat16>(static_cast<uint32_t>(word >> 32 * i)); };
  for (int j = 0; j < 4; ++j) {
    const int row = lane / 4 * 4, column = (lane % 4 * 2 + j % 2) * 4;  // first lanes of a's row and of b's column
    double sum = c[j];
    for (int t = 0; t < 4; ++t)
      for (int pair = 0; pair < 2; ++pair) {
        const float2 x = half(words[pair][row + t], j / 2), y = half(words[2][column + t], pair);
        sum += static_cast<double>(x.x) * y.x + static_cast<double>(x.y) * y.y;
      }
    c[j] = static_cast<float>(sum);
  }
}
DEVICE uint32_t multiply_bf16x2(uint32_t x, uint32_t y) {
  const float2 a = unpack<__nv_bfloat16>(x), b = unpack<__nv_bfloat16>(y);
  return pack<__nv_bfloat16>(a.x * b.x, a.y * b.y);
}

}  // namespace fusible::ptx
