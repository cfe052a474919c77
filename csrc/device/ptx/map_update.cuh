// SPDX-License-Identifier: Apache-2.0
// Tensor maps that are written on the device: a copy in shared memory is changed, then put into device memory. The copy
// engine keeps the maps that it has read, so a later user of a changed map must call `acquire` first, in the thread
// that issues the copies.
#pragma once
#include <cuda.h>

#include "device/ptx/ptx.cuh"

namespace fusible::map_update {

// ---- by one thread, of a map in shared memory
DEVICE void set_address(CUtensorMap* map, const void* address) {
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(ptx::smem_address(map)),
               "l"(address)
               : "memory");
}
template <int kDimension>
DEVICE void set_size(CUtensorMap* map, uint32_t size) {
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(ptx::smem_address(map)),
               "n"(kDimension), "r"(size)
               : "memory");
}
// Sets the pitch of dimension 1, in bytes.
DEVICE void set_pitch(CUtensorMap* map, uint64_t bytes) {
  asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" ::"r"(ptx::smem_address(map)),
               "l"(bytes)
               : "memory");
}

// Publishes a map from shared to device memory, for `acquire` on the other side. Called by a whole warp; both are
// aligned to 128 bytes.
DEVICE void publish(CUtensorMap* to, const CUtensorMap* from) {
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(
          to),
      "r"(ptx::smem_address(from))
      : "memory");
}
DEVICE void acquire(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

}  // namespace fusible::map_update
