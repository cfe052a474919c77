// SPDX-License-Identifier: Apache-2.0
// The kernels as custom calls of XLA: handlers of its foreign function interface, which Python registers with jax.
#pragma once
#include <utility>
#include <vector>

namespace fusible::xla_ffi {

struct Handler {
  const char* name;
  void* function;  // XLA_FFI_Handler*
};

const std::vector<Handler>& handlers();

// Version of the interface that the handlers were compiled for: major, minor. jaxlib refuses a newer one than its own.
std::pair<int, int> api_version();

}  // namespace fusible::xla_ffi
