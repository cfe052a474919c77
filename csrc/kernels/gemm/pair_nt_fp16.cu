// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/instantiate_pair.cuh"

namespace fusible {
template KernelEntry pair_entry<Layout::kNT, DType::kFloat16>(bool, int);
template KernelEntry pair_activation_entry<Layout::kNT, DType::kFloat16>(bool, bool, int);
template KernelEntry pair_activation_backward_entry<Layout::kNT, DType::kFloat16>(int);
}  // namespace fusible
