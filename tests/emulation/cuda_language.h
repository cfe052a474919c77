// What nvcc knows and g++ does not; included before every source. build.py rewrites launches, shared variables and grid constants.
#pragma once
#define __DEVICE_LAUNCH_PARAMETERS_H__  // threadIdx and the others stand below
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "fibers.h"

#undef __launch_bounds__
#undef __forceinline__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define threadIdx (::emulation::current->index)
#define blockIdx (::emulation::current->block->index)

inline void __syncthreads() {
  emulation::Block& block = *emulation::current->block;
  emulation::meet(block.all, block.live, "__syncthreads", [] {});
}
inline void emulate_full_warp(unsigned mask) { emulation::check(mask == ~0u, "only whole warps are emulated"); }
inline void __syncwarp(unsigned mask = ~0u) {
  emulate_full_warp(mask);
  emulation::meet(emulation::current->warp(), 32, "__syncwarp", [] {});
}

template <class T>
T emulate_shuffle(unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= 8);
  emulate_full_warp(mask);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t* all = emulation::exchange(bits, "a shuffle");
  std::memcpy(&value, &all[from], sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) { return emulate_shuffle(mask, value, lane & 31); }
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const int lane = emulation::current->lane(), from = lane - static_cast<int>(delta);
  return emulate_shuffle(mask, value, from < 0 ? lane : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const int lane = emulation::current->lane(), from = lane + static_cast<int>(delta);
  return emulate_shuffle(mask, value, from > 31 ? lane : from);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) { return emulate_shuffle(mask, value, emulation::current->lane() ^ bits); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  emulate_full_warp(mask);
  const uint64_t* all = emulation::exchange(predicate != 0, "a ballot");
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(all[lane]) << lane;
  return votes;
}

inline unsigned __match_any_sync(unsigned mask, int value) {
  emulate_full_warp(mask);
  const uint64_t* all = emulation::exchange(static_cast<unsigned>(value), "a match");
  unsigned peers = 0;
  for (int lane = 0; lane < 32; ++lane) peers |= static_cast<unsigned>(all[lane] == static_cast<unsigned>(value)) << lane;
  return peers;
}

template <class Better>
unsigned emulate_reduction(unsigned mask, unsigned value, Better better) {
  emulate_full_warp(mask);
  const uint64_t* all = emulation::exchange(value, "a reduction");
  for (int lane = 0; lane < 32; ++lane)
    if (better(static_cast<unsigned>(all[lane]), value)) value = static_cast<unsigned>(all[lane]);
  return value;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return emulate_reduction(mask, value, [](unsigned a, unsigned b) { return a > b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return emulate_reduction(mask, value, [](unsigned a, unsigned b) { return a < b; });
}

template <class T, class U>
T atomicAdd(T* to, U value) {
  const T before = *to;
  *to += value;
  return before;
}
template <class T, class U>
T atomicMax(T* to, U value) {
  const T before = *to;
  if (before < value) *to = value;
  return before;
}
// Loads and stores with hints for the caches, which can be checked as ordinary ones cannot.
template <class T>
T emulate_load(const T* from) {
  emulation::check_memory(reinterpret_cast<uintptr_t>(from), sizeof(T), "a load");
  return *from;
}
template <class T>
void emulate_store(T* to, T value) {
  emulation::check_memory(reinterpret_cast<uintptr_t>(to), sizeof(T), "a store");
  *to = value;
}
#define __ldg emulate_load
#define __ldcs emulate_load
#define __ldcg emulate_load
#define __stcs emulate_store
#define __stcg emulate_store

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}
template <class T, class U>
constexpr std::common_type_t<T, U> min(T x, U y) { return y < x ? y : x; }
template <class T, class U>
constexpr std::common_type_t<T, U> max(T x, U y) { return x < y ? y : x; }
