// SPDX-License-Identifier: Apache-2.0
// All of them in one source: each has one kernel, for which reading the headers took longer than compiling it.
#include "kernels/activation/instantiate_activation.cuh"

namespace fusible {
template KernelEntry activation_backward_entry<Layout::kNT, DType::kBFloat16>(int);
template KernelEntry activation_backward_entry<Layout::kNT, DType::kFloat16>(int);
template KernelEntry activation_backward_entry<Layout::kNN, DType::kBFloat16>(int);
template KernelEntry activation_backward_entry<Layout::kNN, DType::kFloat16>(int);
}  // namespace fusible
