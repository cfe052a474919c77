// SPDX-License-Identifier: Apache-2.0
// Single instructions of sm_90a that belong to no other concept: cluster, registers, fences, packing.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define DEVICE __device__ __forceinline__
#define INLINE __attribute__((always_inline))  // for a lambda

namespace fusible::ptx {

DEVICE uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// True in one lane of a whole warp, always the same. The compiler knows this instruction: bulk copies that it guards
// need no loop over lanes whose operands might differ, which takes three times as long.
DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n .reg .pred elected;\n elect.sync _|elected, 0xFFFFFFFF;\n selp.u32 %0, 1, 0, elected;\n}"
               : "=r"(elected));
  return elected;
}

// Programmatic dependent launch: a kernel may be resident before those before it on its stream have ended. It reads and
// writes no memory of theirs until this returns, in each thread that does, or in one that the thread has met since.
DEVICE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The alternative for a kernel that knows by other means which results of earlier kernels it may read. It still waits
// before it ends, so that later kernels also run after the earlier ones.
DEVICE void begin_beside_earlier_kernel() {}
// The next kernel may begin where blocks end, once every block has said so.
DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <int kRegisters>
DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Ordinary shared-memory stores of this thread become visible to TMA and the tensor cores.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same of device memory, which this thread has seen written.
DEVICE void async_proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Brings the line of an address to the first-level cache.
DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L1 [%0];" ::"l"(address)); }
// Prefetches to the L2 cache.
DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// 16 bytes from device to shared memory, past the first-level cache; groups of copies complete in order, for the thread
// that issued them.
DEVICE void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(from) : "memory");
}
// The first `bytes` of 4, and zeros for the others.
DEVICE void copy_async_pair(void* to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes at once, where the compiler would store word by word.
DEVICE void store_vector(void* to, const uint4& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// The same where `wanted`, without a branch; and 8 bytes.
DEVICE void store_vector_if(bool wanted, void* to, const uint4& words) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %0, 0;\n @wanted st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
          static_cast<uint32_t>(wanted)),
      "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}
DEVICE void store_vector_if(bool wanted, void* to, const uint2& words) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %0, 0;\n @wanted st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"(
          static_cast<uint32_t>(wanted)),
      "l"(to), "r"(words.x), "r"(words.y)
      : "memory");
}
// Loads 16 bytes that are constant during the kernel; zeros if not `wanted`.
DEVICE uint4 load_vector_if(bool wanted, const void* from) {
  uint4 words;
  asm("{\n .reg .pred wanted;\n setp.ne.u32 wanted, %4, 0;\n"
      " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @wanted ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%5];\n}"
      : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
      : "r"(static_cast<uint32_t>(wanted)), "l"(from));
  return words;
}

// Loads 16 bytes that are read once and are constant during the kernel: past the L1 cache, with a 256-byte prefetch to
// L2.
DEVICE uint4 load_vector_once(const void* from) {
  uint4 words;
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from));
  return words;
}

// Byte i of the result is the one of `x`, then `y`, that four bits of the selector number; the highest of them gives
// eight times its sign instead.
template <int kSelector>
DEVICE uint32_t permute(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "n"(kSelector));
  return z;
}

// Two floats, rounded to T, the first in the low half.
template <class T>
DEVICE uint32_t pack(float low, float high);
template <>
DEVICE uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
DEVICE uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <class T>
DEVICE float2 unpack(uint32_t pair);
template <>
DEVICE float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}
template <>
DEVICE float2 unpack<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void store_matrix_x4(uint32_t address, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}
// The same, each matrix transposed: lane l gives the address of column l % 8 of matrix l / 8.
DEVICE void store_matrix_x4_transposed(uint32_t address, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}
// The loads that these are the stores of.
DEVICE void load_matrix_x4(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_matrix_x4_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
DEVICE void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

DEVICE float2 load_shared(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

}  // namespace fusible::ptx
