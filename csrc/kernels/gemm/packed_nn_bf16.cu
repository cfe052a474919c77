// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/instantiate_packed.cuh"

namespace fusible {
template KernelEntry packed_entry<Layout::kNN>();
}  // namespace fusible
