// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/instantiate.cuh"

namespace fusible {
template KernelEntry kernel_entry<Layout::kTN, DType::kFloat16>(bool, bool, int);
}  // namespace fusible
