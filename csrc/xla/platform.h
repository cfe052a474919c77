// SPDX-License-Identifier: Apache-2.0
// The device that a handler launches on, and the buffers of a call. The emulation of the tests has a header of its own
// instead, because XLA's CPUs have no stream.
#pragma once
#include <optional>

#include "fusible/launches.h"
#include "xla/ffi/api/ffi.h"

namespace fusible::xla_ffi {

struct Call : OnStream {};

inline void* address(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? buffer.untyped_data() : nullptr;
}

}  // namespace fusible::xla_ffi

template <>
struct xla::ffi::CtxDecoding<fusible::xla_ffi::Call> {
  using Type = fusible::xla_ffi::Call;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    const auto stream = CtxDecoding<PlatformStream<cudaStream_t>>::Decode(api, context, diagnostic);
    if (!device || !stream) return std::nullopt;
    return Type{{*device, *stream}};
  }
};
