// The interface of csrc/device/ptx/wgmma.cuh, emulated.
#pragma once
#include <type_traits>

#include "wgmma.h"
#include "device/ptx/ptx.cuh"

namespace fusible {

DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() { emulation::current->products.commit(); }
template <int kPending>
DEVICE void wgmma_wait() { emulation::wait_for_products(kPending); }

DEVICE uint64_t matrix_descriptor(const void* pointer, uint32_t leading_offset, uint32_t stride_offset) {
  return static_cast<uint64_t>((ptx::smem_address(pointer) & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading_offset >> 4) << 16 |
         static_cast<uint64_t>(stride_offset >> 4) << 32 | 1ull << 62;
}

template <int kSize>
DEVICE void wgmma_e4m3(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kSize % 8 == 0 && (kSize <= 64 || kSize == 128), "16 to 128 columns, or 256");
  emulation::current->products.open.push_back({d, a, b, kSize * 2, accumulate, false, false, emulation::Elements::kE4M3});
}
template <class T, int kTransposeA, int kTransposeB, int kSize>
DEVICE void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>, "operands are bf16 or fp16");
  static_assert(kSize % 4 == 0 && kSize <= 128, "8 to 256 columns");
  emulation::current->products.open.push_back({d, a, b, kSize * 2, accumulate, kTransposeA != 0, kTransposeB != 0,
                                                kBf16 ? emulation::Elements::kBFloat16 : emulation::Elements::kFloat16});
}
// The registers are read when the product is issued.
template <int kSize>
DEVICE void wgmma_registers(float (&d)[kSize], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kSize % 32 == 0 && kSize <= 128, "64, 128, 192 or 256 columns");
  emulation::current->products.open.push_back({d, 0, b, kSize * 2, accumulate, false, false, emulation::Elements::kBFloat16, true, {a[0], a[1], a[2], a[3]}});
}
template <class T, int kTransposeA, int kTransposeB, int kSize>
  requires(sizeof(T) == 1)
DEVICE void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  wgmma_e4m3(d, a, b, accumulate);
}

}  // namespace fusible
