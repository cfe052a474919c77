// An mbarrier in its 64 bits of shared memory.
#pragma once
#include "fibers.h"

namespace emulation {

struct BarrierBits {
  uint64_t phase : 1, count : 20, pending : 20;
  int64_t bytes : 22;      // still to come; below zero where they came before they were announced
  uint64_t uninitialised : 1;  // shared memory begins as ones
};
static_assert(sizeof(BarrierBits) == 8);

inline BarrierBits bits_of(uint64_t word) { return __builtin_bit_cast(BarrierBits, word); }
// Written only when a check has failed: kernels arrive millions of times.
inline std::ostream& operator<<(std::ostream& text, const BarrierBits& b) {
  if (b.uninitialised) return text << "not initialised";
  return text << b.pending << " of " << b.count << " arrivals and " << b.bytes << " bytes missing in phase " << b.phase;
}
inline bool phase_over(uint64_t word, uint32_t parity) { return bits_of(word).phase != (parity & 1); }

// Changes a barrier, and ends its phase where nothing is missing.
template <class Change>
void change_barrier(uint64_t* word, Change change) {
  check(reinterpret_cast<uintptr_t>(word) % 8 == 0, "an mbarrier is not aligned");
  BarrierBits b = bits_of(*word);
  check(!b.uninitialised, "an mbarrier is used before it is initialised");
  change(b);
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.count;
  *word = __builtin_bit_cast(uint64_t, b);
}
inline void arrive(uint64_t* word, int64_t expected_bytes = 0) {
  change_barrier(word, [&](BarrierBits& b) {
    check(b.pending > 0, "one arrival too many at an mbarrier: ", b);
    b.bytes += expected_bytes;
    --b.pending;
  });
}
inline void complete_bytes(uint64_t* word, int64_t bytes) {
  change_barrier(word, [&](BarrierBits& b) { b.bytes -= bytes; });
}
// The same place in block `rank` of the cluster.
template <class T>
T* mapped(T* pointer, uint32_t rank) {
  const auto& blocks = current->block->cluster->blocks;
  check(rank < blocks.size(), "there is no block ", rank, " in the cluster");
  return reinterpret_cast<T*>(shared_pointer(*blocks[rank], shared_address(pointer), sizeof(T)));
}

}  // namespace emulation
