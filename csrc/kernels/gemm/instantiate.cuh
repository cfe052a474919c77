// SPDX-License-Identifier: Apache-2.0
// Turns a layout and an operand type into kernels, one for each output type, epilogue and tile variant.
#pragma once
#include <utility>

#include "kernels/gemm/operand_types.cuh"

namespace fusible {

template <class K>
KernelEntry entry_of() {
  return {reinterpret_cast<const void*>(&grouped_gemm_kernel<K>), K::kThreads,
          static_cast<int>(sizeof(typename K::Storage))};
}

template <Layout kLayout, class T, class Out, bool kScaleBias, TileVariant kVariant>
KernelEntry entry_of_variant() {
  using Pair = Operands<kLayout, T, kVariant>;
  if constexpr (!is_built(kLayout, kVariant, std::is_same_v<Out, float>) || (kScaleBias && !fits_scale_bias(kVariant)))
    return {};
  else return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, Out, kScaleBias, kVariant>>();
}

template <Layout kLayout, class T, class Out, bool kScaleBias, size_t... kVariants>
KernelEntry entry_of_variant(int variant, std::index_sequence<kVariants...>) {
  const KernelEntry entries[] = {entry_of_variant<kLayout, T, Out, kScaleBias, kTileVariants[kVariants]>()...};
  return entries[variant];
}

template <Layout kLayout, DType kOperand>
KernelEntry kernel_entry(bool fp32_output, bool scale_bias, int variant) {
  using T = Element<kOperand>;
  constexpr std::make_index_sequence<kTileVariantCount> kAll;
  if (scale_bias)
    return fp32_output ? entry_of_variant<kLayout, T, float, true>(variant, kAll)
                       : entry_of_variant<kLayout, T, T, true>(variant, kAll);
  return fp32_output ? entry_of_variant<kLayout, T, float, false>(variant, kAll)
                     : entry_of_variant<kLayout, T, T, false>(variant, kAll);
}

}  // namespace fusible
