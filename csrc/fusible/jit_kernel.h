// SPDX-License-Identifier: Apache-2.0
// Kernels that are compiled while the program runs, by ops/kernels/jit.
#pragma once
#include <cstdint>

#include "fusible/error.h"
#include "kernels/gemm/kernel_entry.h"

namespace fusible {

// The result of cuLibraryGetKernel; 0: none. A CUkernel is a cudaKernel_t, which the runtime accepts as the address of
// a kernel. It belongs to no context, so one serves every device, and it is never unloaded. A launch declares it as a
// number, as it is not an address of the call: a replay keeps it.
using JitKernel = int64_t;

// Throws fusible::Error without a kernel.
inline KernelEntry entry_of(JitKernel kernel, int threads, int shared_bytes = 0) {
  FUSIBLE_CHECK(kernel, "there is no compiled kernel");
  return {reinterpret_cast<const void*>(kernel), threads, shared_bytes};
}

// Launches a kernel of one parameter.
template <class Params>
cudaError_t launch(const KernelEntry& kernel, int64_t blocks, cudaStream_t stream, Params& params) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(kernel.threads);
  launch.dynamicSmemBytes = kernel.shared_bytes;
  launch.stream = stream;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&launch, kernel.function, arguments);
}

// A kernel that takes the place of a built-in one has the same threads and shared memory. Without one: the built-in.
inline KernelEntry in_place_of(const KernelEntry& built_in, JitKernel kernel) {
  return kernel ? entry_of(kernel, built_in.threads, built_in.shared_bytes) : built_in;
}

}  // namespace fusible
