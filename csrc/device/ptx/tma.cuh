// SPDX-License-Identifier: Apache-2.0
// Bulk tensor copies between device and shared memory, by tensor map; one overload per number of coordinates.
#pragma once
#include <cuda.h>

#include "device/ptx/ptx.cuh"

namespace fusible::tma {

DEVICE void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- to shared memory, completing on an mbarrier. With `multicast`, the same bytes go to the same offset of every
// block whose bit is set in `blocks`, and complete on that block's barrier.
#define LOAD(n) "cp.async.bulk.tensor." #n "d.shared::cluster.global.mbarrier::complete_tx::bytes"
#define TO "r"(ptx::smem_address(to)), "l"(map), "r"(ptx::smem_address(barrier))
DEVICE void load(const CUtensorMap* map, uint64_t* barrier, void* to, int c0, int c1) {
  asm volatile(LOAD(2) " [%0], [%1, {%3, %4}], [%2];" ::TO, "r"(c0), "r"(c1) : "memory");
}
DEVICE void load(const CUtensorMap* map, uint64_t* barrier, void* to, int c0, int c1, int c2) {
  asm volatile(LOAD(3) " [%0], [%1, {%3, %4, %5}], [%2];" ::TO, "r"(c0), "r"(c1), "r"(c2) : "memory");
}
DEVICE void load(const CUtensorMap* map, uint64_t* barrier, void* to, int c0, int c1, int c2, int c3) {
  asm volatile(LOAD(4) " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::TO, "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEVICE void load(const CUtensorMap* map, uint64_t* barrier, void* to, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(LOAD(5) " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::TO, "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
DEVICE void load_multicast(const CUtensorMap* map, uint64_t* barrier, void* to, uint16_t blocks, int c0, int c1) {
  asm volatile(LOAD(2) ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::TO, "h"(blocks), "r"(c0), "r"(c1)
               : "memory");
}
DEVICE void load_multicast(const CUtensorMap* map, uint64_t* barrier, void* to, uint16_t blocks, int c0, int c1,
                           int c2) {
  asm volatile(LOAD(3) ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::TO, "h"(blocks), "r"(c0), "r"(c1),
               "r"(c2)
               : "memory");
}
DEVICE void load_multicast(const CUtensorMap* map, uint64_t* barrier, void* to, uint16_t blocks, int c0, int c1, int c2,
                           int c3) {
  asm volatile(LOAD(4) ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::TO, "h"(blocks), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
DEVICE void load_multicast(const CUtensorMap* map, uint64_t* barrier, void* to, uint16_t blocks, int c0, int c1, int c2,
                           int c3, int c4) {
  asm volatile(LOAD(5) ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::TO, "h"(blocks), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
#undef TO
#undef LOAD

// ---- to device memory, in groups: either the bytes are stored, or the values are added to the existing ones (in L2;
// fp32,
// bf16 and fp16, as the map says). Coordinates outside of the map's bounds are dropped.
DEVICE uint64_t policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
#define STORE(n) "cp.async.bulk.tensor." #n "d.global.shared::cta.bulk_group.L2::cache_hint"
#define ADD(n) "cp.reduce.async.bulk.tensor." #n "d.global.shared::cta.add.tile.bulk_group.L2::cache_hint"
#define FROM "l"(map), "r"(ptx::smem_address(from)), "l"(policy)
DEVICE void store(const CUtensorMap* map, const void* from, uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(STORE(4) " [%0, {%3, %4, %5, %6}], [%1], %2;" ::FROM, "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEVICE void add(const CUtensorMap* map, const void* from, uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(ADD(4) " [%0, {%3, %4, %5, %6}], [%1], %2;" ::FROM, "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
#undef FROM
#undef ADD
#undef STORE
DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the newest `kPending` groups have read their shared memory.
template <int kPending>
DEVICE void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
DEVICE void wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace fusible::tma
