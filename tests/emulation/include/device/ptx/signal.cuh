// The interface of csrc/device/ptx/signal.cuh, emulated: peers are processes with memory in common.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

#include "device/ptx/ptx.cuh"

namespace fusible {

DEVICE void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

DEVICE void store_release(uint64_t* to, uint64_t word) {
  emulation::check_memory(reinterpret_cast<uintptr_t>(to), sizeof word, "a signal");
  std::atomic_ref<uint64_t>(*to).store(word, std::memory_order_release);
}
DEVICE uint64_t load_acquire(const uint64_t* from) {
  emulation::check_memory(reinterpret_cast<uintptr_t>(from), sizeof *from, "a look at a signal");
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(from)).load(std::memory_order_acquire);
}

DEVICE void add_release(uint32_t* to, uint32_t number) {
  emulation::check_memory(reinterpret_cast<uintptr_t>(to), sizeof number, "a signal");
  std::atomic_ref<uint32_t>(*to).fetch_add(number, std::memory_order_release);
}
DEVICE uint32_t add_acquire_release(uint32_t* to, uint32_t number) {
  emulation::check_memory(reinterpret_cast<uintptr_t>(to), sizeof number, "a signal");
  return std::atomic_ref<uint32_t>(*to).fetch_add(number, std::memory_order_acq_rel);
}
DEVICE uint32_t load_acquire(const uint32_t* from) {
  emulation::check_memory(reinterpret_cast<uintptr_t>(from), sizeof *from, "a look at a signal");
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(from)).load(std::memory_order_acquire);
}

DEVICE int64_t nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
// A process that waits leaves the CPU to the others: a yield alone comes back at once where another one is at work.
DEVICE void pause() {
  thread_local unsigned waits = 0;
  emulation::yield();
  if (++waits % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

}  // namespace fusible
