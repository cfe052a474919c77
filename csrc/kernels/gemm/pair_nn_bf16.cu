// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/instantiate_pair.cuh"

namespace fusible {
template KernelEntry pair_entry<Layout::kNN, DType::kBFloat16>(bool, int);
template KernelEntry pair_activation_entry<Layout::kNN, DType::kBFloat16>(bool, bool, int);
template KernelEntry pair_activation_backward_entry<Layout::kNN, DType::kBFloat16>(int);
}  // namespace fusible
