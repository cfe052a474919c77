// SPDX-License-Identifier: Apache-2.0
// mbarriers. A phase ends when `count` arrivals and all expected bytes have come in.
#pragma once
#include "device/ptx/pipeline.cuh"
#include "device/ptx/ptx.cuh"

namespace fusible {

DEVICE void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx::smem_address(barrier)), "r"(count) : "memory");
}
// Makes the initialised barriers visible to the other block of the cluster and to TMA.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::smem_address(barrier)), "r"(bytes)
               : "memory");
}
DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx::smem_address(barrier)) : "memory");
}
DEVICE void barrier_arrive(uint64_t* barrier, uint32_t count) {  // in the name of so many
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::smem_address(barrier)), "r"(count) : "memory");
}
// Arrives on the same barrier of block `rank` of the cluster. Without `.release.cluster`, which compiles to a fence of
// the whole GPU: the stage that is released was read by wgmma, and those reads have ended when wgmma_wait returns.
// Packed weights are read by loads, but only their own block writes them.
DEVICE void barrier_arrive_remote(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(ptx::smem_address(barrier)),
      "r"(rank)
      : "memory");
}
// Stores to the same place in block `rank` of the cluster, and completes the four bytes on its barrier.
DEVICE void barrier_send(int* to, int value, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n .reg .b32 to, barrier;\n mapa.shared::cluster.u32 to, %0, %3;\n mapa.shared::cluster.u32 barrier, %2, %3;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [barrier];\n}" ::"r"(ptx::smem_address(to)),
      "r"(value), "r"(ptx::smem_address(barrier)), "r"(rank)
      : "memory");
}
// Returns once the phase of the given parity has ended (a fresh barrier counts as having ended parity 1).
DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\nWAIT:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra DONE;\n bra WAIT;\nDONE:\n}" ::"r"(ptx::smem_address(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace fusible
