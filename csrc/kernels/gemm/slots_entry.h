// SPDX-License-Identifier: Apache-2.0
// Instantiations of the grouped GEMM whose rows go to slots.
#pragma once
#include "kernels/gemm/kernel_entry.h"

namespace fusible {

inline constexpr int kSlotsVariants[] = {3, 6};  // in kTileVariants: of long groups, of short ones

// kNT, bf16, with WithRowSlots<GemmParams>.
KernelEntry slots_entry(bool scale_bias, int variant);

}  // namespace fusible
