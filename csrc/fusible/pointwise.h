// SPDX-License-Identifier: Apache-2.0
// Pointwise functions over dense rows: one launch of a kernel that ops/kernels/jit has compiled for the function.
#pragma once
#include <cuda_runtime_api.h>

#include <vector>

#include "fusible/jit_kernel.h"
#include "fusible/pointwise_params.h"

namespace fusible {

using Constants = std::vector<float>;

struct Pointwise {
  JitKernel function;
  PointwiseParams params;  // but the constants
  Constants constants;
};

// Throws fusible::Error if the launch fails. Launches nothing for empty inputs.
void pointwise(const Pointwise& call, int device, cudaStream_t stream);

}  // namespace fusible
