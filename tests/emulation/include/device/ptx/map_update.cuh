// The interface of csrc/device/ptx/map_update.cuh, emulated.
#pragma once
#include "tensor_map.h"
#include "device/ptx/ptx.cuh"

namespace fusible::map_update {

DEVICE void set_address(CUtensorMap* map, const void* address) { emulation::set_map_address(map, address); }
template <int kDimension>
DEVICE void set_size(CUtensorMap* map, uint32_t size) {
  emulation::set_map_size(map, kDimension, size);
}
DEVICE void set_pitch(CUtensorMap* map, uint64_t bytes) { emulation::set_map_pitch(map, bytes); }
DEVICE void publish(CUtensorMap* to, const CUtensorMap* from) {
  emulation::meet(emulation::current->warp(), 32, "the publication of a map", [&] { emulation::publish_map(to, from); });
}
DEVICE void acquire(const CUtensorMap* map) { emulation::acquire_map(map); }

}  // namespace fusible::map_update
