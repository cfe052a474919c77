// Warpgroup matrix products: accumulator[64 x N] (+)= A[64 x 16] B[16 x N], A and B in shared memory, fp32 accumulators.
#pragma once
#include <type_traits>

#include "device/ptx.cuh"

namespace fusible {

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Shared-memory operand with 128-byte swizzle. Offsets in bytes; their meaning depends on the major (operands.cuh).
DEVICE uint64_t matrix_descriptor(const void* pointer, uint32_t leading_offset, uint32_t stride_offset) {
  return static_cast<uint64_t>((ptx::smem_address(pointer) & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading_offset >> 4) << 16 |
         static_cast<uint64_t>(stride_offset >> 4) << 32 | 1ull << 62;
}

#define ACC(i) "+f"(d[i])
#define ACC8(i) ACC(i), ACC(i + 1), ACC(i + 2), ACC(i + 3), ACC(i + 4), ACC(i + 5), ACC(i + 6), ACC(i + 7)
#define ACC32(i) ACC8(i), ACC8(i + 8), ACC8(i + 16), ACC8(i + 24)
#define REGISTERS0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS1 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS2 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS3 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The operands follow the accumulators: a, b, accumulate, transpose a, transpose b are numbers %n, %n+1, ...
#define WGMMA(n, type, registers, a_, b_, accumulate_, transpose_a, transpose_b, ...)                                               \
  asm volatile("{\n .reg .pred accumulate;\n setp.ne.b32 accumulate, " accumulate_ ", 0;\n"                                        \
               " wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, " a_ ", " b_                     \
               ", accumulate, 1, 1, " transpose_a ", " transpose_b ";\n}"                                                          \
               : __VA_ARGS__                                                                                                       \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA), "n"(kTransposeB))
#define WGMMA_128(type) \
  WGMMA(128, type, REGISTERS0 "," REGISTERS1, "%64", "%65", "%66", "%67", "%68", ACC32(0), ACC32(32))
#define WGMMA_192(type) \
  WGMMA(192, type, REGISTERS0 "," REGISTERS1 "," REGISTERS2, "%96", "%97", "%98", "%99", "%100", ACC32(0), ACC32(32), ACC32(64))
#define WGMMA_256(type)                                                                                                  \
  WGMMA(256, type, REGISTERS0 "," REGISTERS1 "," REGISTERS2 "," REGISTERS3, "%128", "%129", "%130", "%131", "%132", ACC32(0), \
        ACC32(32), ACC32(64), ACC32(96))

// Thread t = 32 w + l of the warpgroup holds, in d[4c .. 4c+3], row 16w + l/4 (first two) and 8 below it (last two) of columns
// 8c + 2(l%4) and the next. kTranspose selects an MN-major operand.
template <class T, int kTransposeA, int kTransposeB, int kSize>
DEVICE void wgmma(float (&d)[kSize], uint64_t a, uint64_t b, bool accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>, "operands are bf16 or fp16");
  static_assert(kSize == 64 || kSize == 96 || kSize == 128, "tiles are 128, 192 or 256 columns wide");
  if constexpr (kSize == 64 && kBf16) WGMMA_128("bf16");
  if constexpr (kSize == 64 && !kBf16) WGMMA_128("f16");
  if constexpr (kSize == 96 && kBf16) WGMMA_192("bf16");
  if constexpr (kSize == 96 && !kBf16) WGMMA_192("f16");
  if constexpr (kSize == 128 && kBf16) WGMMA_256("bf16");
  if constexpr (kSize == 128 && !kBf16) WGMMA_256("f16");
}
#undef WGMMA_256
#undef WGMMA_192
#undef WGMMA_128
#undef WGMMA
#undef REGISTERS3
#undef REGISTERS2
#undef REGISTERS1
#undef REGISTERS0
#undef ACC32
#undef ACC8
#undef ACC

}  // namespace fusible
