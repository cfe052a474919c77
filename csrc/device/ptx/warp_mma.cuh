// SPDX-License-Identifier: Apache-2.0
// Products of one warp whose operands are in registers.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible::ptx {

// c [16, 8] += a [16, 16] b [16, 8]. Lane l has of a, in a[i], two neighbouring columns from l % 4 * 2 + i / 2 * 8 on
// of row l / 4 + i % 2 * 8; of b, in b[i], two neighbouring rows from l % 4 * 2 + i * 8 on of column l / 4; of c, in
// c[i], column l % 4 * 2 + i % 2 of row l / 4 + i / 2 * 8.
template <class T>
DEVICE void warp_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#define FUSIBLE_WARP_MMA(T, name)                                                            \
  template <>                                                                                \
  DEVICE void warp_mma<T>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                      \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"      \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));            \
  }
FUSIBLE_WARP_MMA(__nv_bfloat16, "bf16")
FUSIBLE_WARP_MMA(__half, "f16")
#undef FUSIBLE_WARP_MMA

}  // namespace fusible::ptx
