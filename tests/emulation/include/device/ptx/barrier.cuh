// The interface of csrc/device/ptx/barrier.cuh, emulated.
#pragma once
#include "barrier.h"
#include "device/ptx/ptx.cuh"
#include "device/ptx/pipeline.cuh"

namespace fusible {

DEVICE void barrier_init(uint64_t* barrier, uint32_t count) {
  (void)ptx::smem_address(barrier);
  emulation::check(count > 0 && count < 1 << 20, "an mbarrier for ", count, " arrivals");
  *barrier = __builtin_bit_cast(uint64_t, emulation::BarrierBits{.phase = 0, .count = count, .pending = count, .bytes = 0, .uninitialised = 0});
}
DEVICE void barrier_init_fence() {}
DEVICE void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) { emulation::arrive(barrier, bytes); }
DEVICE void barrier_arrive(uint64_t* barrier) { emulation::arrive(barrier); }
DEVICE void barrier_arrive(uint64_t* barrier, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) emulation::arrive(barrier);
}
DEVICE void barrier_arrive_remote(uint64_t* barrier, uint32_t rank) { emulation::arrive(emulation::mapped(barrier, rank)); }
DEVICE void barrier_send(int* to, int value, uint64_t* barrier, uint32_t rank) {
  *emulation::mapped(to, rank) = value;
  emulation::complete_bytes(emulation::mapped(barrier, rank), sizeof(int));
}
DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  (void)ptx::smem_address(barrier);
  emulation::check(!emulation::bits_of(*barrier).uninitialised, "an mbarrier is waited for before it is initialised");
  emulation::wait({.barrier = barrier, .parity = parity});
}

}  // namespace fusible
