// SPDX-License-Identifier: Apache-2.0
#include "kernels/activation/instantiate_activation.cuh"

namespace fusible {
template KernelEntry arriving_activation_entry<Layout::kNT, DType::kBFloat16>(bool, bool, int);
}  // namespace fusible
