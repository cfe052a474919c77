// The interface of csrc/device/ptx/bulk_copy.cuh, emulated.
#pragma once
#include "barrier.h"
#include "device/ptx/ptx.cuh"

namespace fusible::bulk {

inline void check_copy(const void* shared, const void* global, uint32_t bytes) {
  (void)emulation::shared_pointer(ptx::smem_address(shared), bytes);
  const auto alignment = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes;
  emulation::check(bytes > 0 && alignment % 16 == 0, "a bulk copy of ", bytes, " bytes is not aligned to 16");
  emulation::check_memory(reinterpret_cast<uintptr_t>(global), bytes, "a bulk copy");
}

// At once: as early as is allowed.
DEVICE void load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  check_copy(to, from, bytes);
  std::memcpy(to, from, bytes);
  emulation::complete_bytes(barrier, bytes);
}
// When it is waited for.
DEVICE void store(void* to, const void* from, uint32_t bytes) {
  check_copy(from, to, bytes);
  emulation::current->stores.open.push_back([=] { std::memcpy(to, from, bytes); });
}

}  // namespace fusible::bulk
