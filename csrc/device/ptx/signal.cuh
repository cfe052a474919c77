// SPDX-License-Identifier: Apache-2.0
// Words by which GPUs of one host tell one another, and the host, that something is done.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible {

// Makes this thread's writes, and the writes it has seen, visible to every GPU and the host before its later writes.
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

DEVICE void store_release(uint64_t* to, uint64_t word) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
DEVICE uint64_t load_acquire(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

// The same between kernels of one device.
DEVICE void add_release(uint32_t* to, uint32_t number) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}
// Returns the number before.
DEVICE uint32_t add_acquire_release(uint32_t* to, uint32_t number) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(number) : "memory");
  return before;
}
DEVICE uint32_t load_acquire(const uint32_t* from) {
  uint32_t number;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(from) : "memory");
  return number;
}

DEVICE int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// Between two looks at a word.
DEVICE void pause() { asm volatile("nanosleep.u32 32;"); }

}  // namespace fusible
