// SPDX-License-Identifier: Apache-2.0
#include "fusible/jit_kernel.h"

#include "fusible/error.h"

namespace fusible {

KernelEntry entry_of(JitKernel kernel, int threads, int shared_bytes) {
  FUSIBLE_CHECK(kernel, "there is no compiled kernel");
  return {reinterpret_cast<const void*>(kernel), threads, shared_bytes};
}

}  // namespace fusible
