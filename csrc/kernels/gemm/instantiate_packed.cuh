// SPDX-License-Identifier: Apache-2.0
// Turns a layout into the kernel whose weights are packed. Only rows of a forward have biases and factors.
#pragma once
#include "device/gemm/packed_groups.cuh"
#include "device/gemm/packed_mainloop.cuh"
#include "kernels/gemm/instantiate.cuh"

namespace fusible {

template <Layout kLayout>
KernelEntry packed_entry() {
  using T = Element<DType::kBFloat16>;
  constexpr bool kForward = kLayout == Layout::kNT;
  using Tokens = TokenRows<T, kPackedVariant.token_box()>;
  using Weights = std::conditional_t<kForward, PackedRows, PackedColumns>;
  return entry_of<
      GroupedGemmKernel<Tokens, Weights, T, kForward, kPackedVariant, StoreEpilogue, PackedGroups, PackedScaling>>();
}

}  // namespace fusible
