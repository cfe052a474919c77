// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a kernel begins while those before it on its stream end. Every thread of it calls
// ptx::wait_for_earlier_kernels before it reads or writes memory.
#pragma once
#include <cuda_runtime_api.h>

namespace fusible {

inline cudaLaunchAttribute overlapping() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace fusible
