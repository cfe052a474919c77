// SPDX-License-Identifier: Apache-2.0
#include "kernels/ragged/instantiate_ragged.cuh"

namespace fusible {
template KernelEntry ragged_entry<DType::kFloat16>(Layout, bool);
}  // namespace fusible
