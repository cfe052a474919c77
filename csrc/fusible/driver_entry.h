// SPDX-License-Identifier: Apache-2.0
// Functions of the driver, which are looked up at run time, so that nothing links to libcuda.
#pragma once
#include <cuda_runtime_api.h>

#include "fusible/error.h"

namespace fusible {

// A function by its name, as it is since a version of CUDA: 12000 is 12.0.
template <class Function>
Function driver_entry(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult status{};
  FUSIBLE_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &status),
                     "looking for ", name);
  FUSIBLE_CHECK(status == cudaDriverEntryPointSuccess, "this driver has no ", name, " of CUDA ", version / 1000,
                "; it is too old");
  return reinterpret_cast<Function>(entry);
}

}  // namespace fusible
