// The interface of csrc/device/ptx/ptx.cuh, emulated.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "fibers.h"

#define DEVICE inline
#define INLINE

namespace fusible::ptx {

DEVICE uint32_t smem_address(const void* pointer) { return emulation::shared_address(pointer); }
DEVICE uint32_t cluster_rank() { return emulation::current->block->rank; }
DEVICE void cluster_sync() {
  emulation::Cluster& cluster = *emulation::current->block->cluster;
  emulation::meet(cluster, cluster.live, "the barrier of the cluster", [] {});
}
DEVICE void begin_beside_earlier_kernel() { emulation::begin_beside(); }
DEVICE void async_proxy_fence_global() {}
DEVICE void wait_for_earlier_kernels() { emulation::current->waited = true; }
DEVICE void let_next_kernel_begin() { emulation::let_next_begin(); }
template <int kRegisters>
DEVICE void registers_decrease() { static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256); }
template <int kRegisters>
DEVICE void registers_increase() { static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256); }
DEVICE void async_proxy_fence() {}
DEVICE bool elect_one() { return emulation::current->number % 32 == 0; }

DEVICE void prefetch(const void* address) { emulation::check_memory(reinterpret_cast<uintptr_t>(address), 1, "prefetch"); }
DEVICE void prefetch_l2(const void* address) { prefetch(address); }

// Carried out as late as their wait allows.
DEVICE void copy_async(void* to, const void* from) {
  (void)emulation::shared_pointer(smem_address(to), 16);
  emulation::check((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0, "cp.async is not aligned to 16 bytes");
  emulation::check_memory(reinterpret_cast<uintptr_t>(from), 16, "cp.async");
  emulation::current->copies.open.push_back([=] { std::memcpy(to, from, 16); });
}
DEVICE void copy_async_pair(void* to, const void* from, int bytes) {
  (void)emulation::shared_pointer(smem_address(to), 4);
  emulation::check((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 4 == 0, "cp.async is not aligned to 4 bytes");
  emulation::check(bytes >= 0 && bytes <= 4, "cp.async of ", bytes, " of 4 bytes");
  if (bytes) emulation::check_memory(reinterpret_cast<uintptr_t>(from), bytes, "cp.async");
  emulation::current->copies.open.push_back([=] {
    std::memset(to, 0, 4);
    std::memcpy(to, from, bytes);
  });
}
DEVICE void copy_async_commit() { emulation::current->copies.commit(); }
template <int kPending>
DEVICE void copy_async_wait() { emulation::current->copies.complete_all_but(kPending, [](auto& copy) { copy(); }); }

DEVICE void store_vector(void* to, const uint4& words) { *static_cast<uint4*>(to) = words; }
template <class Words>
void store_vector_if(bool wanted, void* to, const Words& words) {
  emulation::check(reinterpret_cast<uintptr_t>(to) % sizeof(Words) == 0 || !wanted, "a store is not aligned");
  if (wanted) emulate_store(static_cast<Words*>(to), words);
}
DEVICE uint4 load_vector_if(bool wanted, const void* from) {
  emulation::check(reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0 || !wanted, "a load is not aligned");
  return wanted ? emulate_load(static_cast<const uint4*>(from)) : uint4{};
}

DEVICE uint4 load_vector_once(const void* from) { return load_vector_if(true, from); }
template <int kSelector>
uint32_t permute(uint32_t x, uint32_t y) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t z = 0;
  for (int i = 0; i < 4; ++i) {
    const int number = kSelector >> 4 * i & 15, byte = static_cast<int>(bytes >> 8 * (number & 7) & 0xFF);
    z |= static_cast<uint32_t>(number < 8 ? byte : byte & 0x80 ? 0xFF : 0) << 8 * i;
  }
  return z;
}

template <class T>
DEVICE uint32_t pack(float low, float high) {
  const T pair[2] = {static_cast<T>(low), static_cast<T>(high)};
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return bits;
}
template <class T>
DEVICE float2 unpack(uint32_t bits) {
  T pair[2];
  std::memcpy(pair, &bits, sizeof bits);
  return {static_cast<float>(pair[0]), static_cast<float>(pair[1])};
}

DEVICE void store_matrix_x4(uint32_t address, const uint32_t (&m)[4]) {
  emulation::check(address % 16 == 0, "stmatrix is not aligned to 16 bytes");
  const uint64_t* addresses = emulation::exchange(address, "stmatrix");
  const int lane = emulation::current->lane();
  for (int i = 0; i < 4; ++i) std::memcpy(emulation::shared_pointer(addresses[i * 8 + lane / 4], 16) + lane % 4 * 4, &m[i], 4);
}
DEVICE void store_matrix_x4_transposed(uint32_t address, const uint32_t (&m)[4]) {
  emulation::check(address % 16 == 0, "stmatrix is not aligned to 16 bytes");
  const uint64_t* addresses = emulation::exchange(address, "stmatrix");
  const int row = emulation::current->lane() / 4, column = emulation::current->lane() % 4 * 2;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      const uint16_t value = static_cast<uint16_t>(m[i] >> 16 * j);
      std::memcpy(emulation::shared_pointer(addresses[i * 8 + column + j], 16) + row * 2, &value, 2);
    }
}
DEVICE void load_matrix_x4(uint32_t (&m)[4], uint32_t address) {
  emulation::check(address % 16 == 0, "ldmatrix is not aligned to 16 bytes");
  const uint64_t* addresses = emulation::exchange(address, "ldmatrix");
  const int lane = emulation::current->lane();
  for (int i = 0; i < 4; ++i) std::memcpy(&m[i], emulation::shared_pointer(addresses[i * 8 + lane / 4], 16) + lane % 4 * 4, 4);
}
DEVICE void load_matrix_x4_transposed(uint32_t (&m)[4], uint32_t address) {
  emulation::check(address % 16 == 0, "ldmatrix is not aligned to 16 bytes");
  const uint64_t* addresses = emulation::exchange(address, "ldmatrix");
  const int row = emulation::current->lane() / 4, column = emulation::current->lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) std::memcpy(&pair[j], emulation::shared_pointer(addresses[i * 8 + column + j], 16) + row * 2, 2);
    std::memcpy(&m[i], pair, 4);
  }
}
DEVICE void store_shared(uint32_t address, float x, float y) {
  emulation::check(address % 8 == 0, "a shared store of 8 bytes is not aligned");
  const float pair[2] = {x, y};
  std::memcpy(emulation::shared_pointer(address, 8), pair, 8);
}
DEVICE float2 load_shared(uint32_t address) {
  emulation::check(address % 8 == 0, "a shared load of 8 bytes is not aligned");
  float pair[2];
  std::memcpy(pair, emulation::shared_pointer(address, 8), 8);
  return {pair[0], pair[1]};
}

}  // namespace fusible::ptx
