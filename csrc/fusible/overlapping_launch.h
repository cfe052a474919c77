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

// Launches a kernel of one parameter so.
template <class Params>
cudaError_t launch_overlapping(const void* kernel, dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                               const Params& params) {
  cudaLaunchAttribute attribute = overlapping();
  cudaLaunchConfig_t launch{};
  launch.gridDim = blocks;
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&launch, kernel, arguments);
}

}  // namespace fusible
