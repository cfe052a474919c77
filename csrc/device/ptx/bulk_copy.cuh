// SPDX-License-Identifier: Apache-2.0
// Bulk copies of contiguous bytes between device and shared memory: multiples of 16, from and to multiples of 16.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible::bulk {

// Copies to shared memory, completing on an mbarrier.
DEVICE void load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   ptx::smem_address(to)),
               "l"(from), "r"(bytes), "r"(ptx::smem_address(barrier))
               : "memory");
}
// Copies to device memory, in the same groups as the stores of device/ptx/tma.cuh.
DEVICE void store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(ptx::smem_address(from)),
               "r"(bytes)
               : "memory");
}

}  // namespace fusible::bulk
