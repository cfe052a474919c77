// SPDX-License-Identifier: Apache-2.0
// The matrix product of one warp, whose operands are in registers.
#pragma once
#include "device/ptx.cuh"

namespace fusible::ptx {

// c[16 x 8] += a[16 x 16] b[16 x 8] of bf16, in fp32. Lane l holds, of a and of c, rows l/4 and 8 below it; of b and of
// c, columns l/4 and 2(l%4) with the next. Which values of the depth a lane holds does not matter, if those of a and b
// are the same: two pairs, a[0] and a[1] with b[0] of either row, a[2] and a[3] with b[1].
DEVICE void multiply_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two products of bf16.
DEVICE uint32_t multiply_bf16x2(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

}  // namespace fusible::ptx
