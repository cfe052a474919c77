// The interface of csrc/device/ptx/tma.cuh, emulated.
#pragma once
#include "tensor_map.h"
#include "device/ptx/ptx.cuh"

namespace fusible::tma {

DEVICE void prefetch_map(const CUtensorMap* map) { emulation::check_map(map); }

template <class... Coordinates>
DEVICE void load(const CUtensorMap* map, uint64_t* barrier, void* to, Coordinates... c) {
  emulation::load_box(map, barrier, to, 1u << emulation::current->block->rank, {c...});
}
template <class... Coordinates>
DEVICE void load_multicast(const CUtensorMap* map, uint64_t* barrier, void* to, uint16_t blocks, Coordinates... c) {
  emulation::load_box(map, barrier, to, blocks, {c...});
}

DEVICE uint64_t policy_evict_first() { return 0; }
template <class... Coordinates>
DEVICE void store(const CUtensorMap* map, const void* from, uint64_t, Coordinates... c) {
  emulation::store_box(map, from, false, {c...});
}
template <class... Coordinates>
DEVICE void add(const CUtensorMap* map, const void* from, uint64_t, Coordinates... c) {
  emulation::store_box(map, from, true, {c...});
}
DEVICE void commit() { emulation::current->stores.commit(); }
template <int kPending>
DEVICE void wait_read() { emulation::current->stores.complete_all_but(kPending, [](auto& store) { store(); }); }
DEVICE void wait_all() { wait_read<0>(); }

}  // namespace fusible::tma
