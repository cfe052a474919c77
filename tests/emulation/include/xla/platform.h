// The call of a handler by XLA's CPU: one at a time, as the emulation has one device, whose memory is that of the call.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "fusible/launches.h"
#include "xla/ffi/api/ffi.h"

extern "C" void emulation_clear_memory();
extern "C" void emulation_add_memory(uint64_t address, uint64_t bytes);

namespace fusible::xla_ffi {

inline std::mutex one_at_a_time;

struct Call : OnStream {
  std::shared_ptr<std::unique_lock<std::mutex>> lock;
};

inline void* address(const xla::ffi::AnyBuffer& buffer) {
  if (buffer.element_count() == 0) return nullptr;
  emulation_add_memory(reinterpret_cast<uintptr_t>(buffer.untyped_data()), buffer.size_bytes());
  return buffer.untyped_data();
}

}  // namespace fusible::xla_ffi

template <>
struct xla::ffi::CtxDecoding<fusible::xla_ffi::Call> {
  using Type = fusible::xla_ffi::Call;

  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    Type call{{0, nullptr}, std::make_shared<std::unique_lock<std::mutex>>(fusible::xla_ffi::one_at_a_time)};
    emulation_clear_memory();
    return call;
  }
};
