// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products: accumulator[64 x N] (+)= A[64 x 16] B[16 x N], A and B in shared memory, fp32
// accumulators. With e4m3 they are 32 deep, and the accumulators keep 13 fraction bits of what they add.
#pragma once
#include <type_traits>

#include "device/ptx/ptx.cuh"

namespace fusible {

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared-memory operand with 128-byte swizzle. Offsets in bytes; their meaning depends on the major (operands.cuh).
DEVICE uint64_t matrix_descriptor(const void* pointer, uint32_t leading_offset, uint32_t stride_offset) {
  return static_cast<uint64_t>((ptx::smem_address(pointer) & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(leading_offset >> 4) << 16 | static_cast<uint64_t>(stride_offset >> 4) << 32 |
         1ull << 62;
}

#define ACC(i) "+f"(d[i])
#define ACC8(i) ACC(i), ACC(i + 1), ACC(i + 2), ACC(i + 3), ACC(i + 4), ACC(i + 5), ACC(i + 6), ACC(i + 7)
#define ACC32(i) ACC8(i), ACC8(i + 8), ACC8(i + 16), ACC8(i + 24)
#define REGISTERS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGISTERS16 REGISTERS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS24 REGISTERS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define REGISTERS32 REGISTERS24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS40 REGISTERS32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGISTERS48 REGISTERS40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS56 REGISTERS48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define REGISTERS64 REGISTERS56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS72 REGISTERS64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define REGISTERS80 REGISTERS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define REGISTERS88 REGISTERS80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define REGISTERS96 REGISTERS80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS112 REGISTERS96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS128 REGISTERS112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The operands follow the accumulators: a, b, accumulate, transpose a, transpose b are numbers %n, %n+1, ...
#define WGMMA(n, type, registers, a_, b_, accumulate_, transpose_a, transpose_b, ...)                           \
  asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " accumulate_                              \
               ", 0;\n"                                                                                         \
               " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, " a_ ", " b_ \
               ", accumulate, 1, 1, " transpose_a ", " transpose_b ";\n}"                                       \
               : __VA_ARGS__                                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA), "n"(kTransposeB))
#define WGMMA_16(type) WGMMA(16, type, REGISTERS8, "%8", "%9", "%10", "%11", "%12", ACC8(0))
#define WGMMA_32(type) WGMMA(32, type, REGISTERS16, "%16", "%17", "%18", "%19", "%20", ACC8(0), ACC8(8))
#define WGMMA_48(type) WGMMA(48, type, REGISTERS24, "%24", "%25", "%26", "%27", "%28", ACC8(0), ACC8(8), ACC8(16))
#define WGMMA_64(type) WGMMA(64, type, REGISTERS32, "%32", "%33", "%34", "%35", "%36", ACC32(0))
#define WGMMA_80(type) WGMMA(80, type, REGISTERS40, "%40", "%41", "%42", "%43", "%44", ACC32(0), ACC8(32))
#define WGMMA_96(type) WGMMA(96, type, REGISTERS48, "%48", "%49", "%50", "%51", "%52", ACC32(0), ACC8(32), ACC8(40))
#define WGMMA_112(type) \
  WGMMA(112, type, REGISTERS56, "%56", "%57", "%58", "%59", "%60", ACC32(0), ACC8(32), ACC8(40), ACC8(48))
#define WGMMA_128(type) WGMMA(128, type, REGISTERS64, "%64", "%65", "%66", "%67", "%68", ACC32(0), ACC32(32))
#define WGMMA_144(type) WGMMA(144, type, REGISTERS72, "%72", "%73", "%74", "%75", "%76", ACC32(0), ACC32(32), ACC8(64))
#define WGMMA_160(type) \
  WGMMA(160, type, REGISTERS80, "%80", "%81", "%82", "%83", "%84", ACC32(0), ACC32(32), ACC8(64), ACC8(72))
#define WGMMA_176(type) \
  WGMMA(176, type, REGISTERS88, "%88", "%89", "%90", "%91", "%92", ACC32(0), ACC32(32), ACC8(64), ACC8(72), ACC8(80))
#define WGMMA_192(type) \
  WGMMA(192, type, REGISTERS96, "%96", "%97", "%98", "%99", "%100", ACC32(0), ACC32(32), ACC32(64))
#define WGMMA_256(type) \
  WGMMA(256, type, REGISTERS128, "%128", "%129", "%130", "%131", "%132", ACC32(0), ACC32(32), ACC32(64), ACC32(96))
#define WGMMA_E4M3(n, registers, a_, b_, accumulate_, ...)                                              \
  if constexpr (kSize == n / 2)                                                                         \
  asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " accumulate_                      \
               ", 0;\n"                                                                                 \
               " wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, " a_ ", " b_ \
               ", accumulate, 1, 1;\n}"                                                                 \
               : __VA_ARGS__                                                                            \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
// The e4m3 product; both operands are K-major.
template <int kSize>
DEVICE void wgmma_e4m3(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kSize == 64 || kSize == 128, "products are 128 or 256 columns wide");
  WGMMA_E4M3(128, REGISTERS64, "%64", "%65", "%66", ACC32(0), ACC32(32));
  WGMMA_E4M3(256, REGISTERS128, "%128", "%129", "%130", ACC32(0), ACC32(32), ACC32(64), ACC32(96));
}
#undef WGMMA_E4M3

// A in registers, which stay as they are until the product is done. Thread t = 32 w + l of the warpgroup holds row 16w
// + l/4 of the columns 2(l%4) and the next in a[0], eight columns further in a[2], and 8 rows below those in a[1] and
// a[3].
#define WGMMA_REGISTERS(n, registers, a0, a1, a2, a3, b_, accumulate_, ...)                                           \
  if constexpr (kSize == n / 2)                                                                                       \
  asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " accumulate_                                    \
               ", 0;\n"                                                                                               \
               " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" registers "}, {" a0 "," a1 "," a2 "," a3 \
               "}, " b_ ", accumulate, 1, 1, 0;\n}"                                                                   \
               : __VA_ARGS__                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
// The product of bf16 whose left operand is in registers; the right one is K-major.
template <int kSize>
DEVICE void wgmma_registers(float (&d)[kSize], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kSize % 32 == 0 && kSize <= 128, "products are 64, 128, 192 or 256 columns wide");
  WGMMA_REGISTERS(64, REGISTERS32, "%32", "%33", "%34", "%35", "%36", "%37", ACC32(0));
  WGMMA_REGISTERS(128, REGISTERS64, "%64", "%65", "%66", "%67", "%68", "%69", ACC32(0), ACC32(32));
  WGMMA_REGISTERS(192, REGISTERS96, "%96", "%97", "%98", "%99", "%100", "%101", ACC32(0), ACC32(32), ACC32(64));
  WGMMA_REGISTERS(256, REGISTERS128, "%128", "%129", "%130", "%131", "%132", "%133", ACC32(0), ACC32(32), ACC32(64),
                  ACC32(96));
}
#undef WGMMA_REGISTERS

#define WGMMA_OF_SIZE(n)                    \
  if constexpr (kSize == n / 2) {           \
    if constexpr (kBf16) WGMMA_##n("bf16"); \
    else WGMMA_##n("f16");                  \
  }

// Thread t = 32 w + l of the warpgroup holds, in d[4c .. 4c+3], row 16w + l/4 (first two) and 8 below it (last two) of
// columns 8c + 2(l%4) and the next. kTranspose selects an MN-major operand.
template <class T, int kTransposeA, int kTransposeB, int kSize>
DEVICE void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>, "operands are bf16 or fp16");
  static_assert(kSize % 8 == 0 && (kSize <= 96 || kSize == 128), "products are 16 to 192 columns wide, by 16, or 256");
  WGMMA_OF_SIZE(16)
  WGMMA_OF_SIZE(32)
  WGMMA_OF_SIZE(48)
  WGMMA_OF_SIZE(64)
  WGMMA_OF_SIZE(80)
  WGMMA_OF_SIZE(96)
  WGMMA_OF_SIZE(112)
  WGMMA_OF_SIZE(128)
  WGMMA_OF_SIZE(144)
  WGMMA_OF_SIZE(160)
  WGMMA_OF_SIZE(176)
  WGMMA_OF_SIZE(192)
  WGMMA_OF_SIZE(256)
}
template <class T, int kTransposeA, int kTransposeB, int kSize>
  requires(sizeof(T) == 1)
DEVICE void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  wgmma_e4m3(d, a, b, accumulate);
}
#undef WGMMA_OF_SIZE
#undef WGMMA_256
#undef WGMMA_192
#undef WGMMA_176
#undef WGMMA_160
#undef WGMMA_144
#undef WGMMA_128
#undef WGMMA_112
#undef WGMMA_96
#undef WGMMA_80
#undef WGMMA_64
#undef WGMMA_48
#undef WGMMA_32
#undef WGMMA_16
#undef WGMMA
#undef REGISTERS128
#undef REGISTERS112
#undef REGISTERS96
#undef REGISTERS88
#undef REGISTERS80
#undef REGISTERS72
#undef REGISTERS64
#undef REGISTERS56
#undef REGISTERS48
#undef REGISTERS40
#undef REGISTERS32
#undef REGISTERS24
#undef REGISTERS16
#undef REGISTERS8
#undef ACC32
#undef ACC8
#undef ACC

}  // namespace fusible
