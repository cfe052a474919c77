// SPDX-License-Identifier: Apache-2.0
#include "kernels/activation/instantiate_activation.cuh"

namespace fusible {
template KernelEntry activation_entry<Layout::kNN, DType::kFloat16>(bool, bool, int);
}  // namespace fusible
