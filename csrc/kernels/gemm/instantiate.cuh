// SPDX-License-Identifier: Apache-2.0
// Turns a layout and an operand type into kernels, one for each output type, epilogue and tile variant.
#pragma once
#include <iterator>
#include <utility>

#include "kernels/gemm/operand_types.cuh"

namespace fusible {

template <class K>
KernelEntry entry_of() {
  return {reinterpret_cast<const void*>(&grouped_gemm_kernel<K>), K::kThreads,
          static_cast<int>(sizeof(typename K::Storage))};
}

// make(std::integral_constant) of the one of these variants that is asked for; without a function if none of them is.
template <const auto& kVariants, class Make>
KernelEntry entry_among(int variant, const Make& make) {
  return [&]<size_t... kIndices>(std::index_sequence<kIndices...>) {
    KernelEntry entry{};
    (void)((variant == kVariants[kIndices] &&
            (entry = make(std::integral_constant<int, kVariants[kIndices]>()), true)) ||
           ...);
    return entry;
  }(std::make_index_sequence<std::size(kVariants)>());
}

template <Layout kLayout, class T, class Out, bool kScaleBias, TileVariant kVariant>
KernelEntry entry_of_variant() {
  using Pair = Operands<kLayout, T, kVariant>;
  if constexpr (!is_built(kLayout, kVariant, std::is_same_v<Out, float>, kScaleBias)) return {};
  else return entry_of<GroupedGemmKernel<typename Pair::A, typename Pair::B, Out, kScaleBias, kVariant>>();
}

template <Layout kLayout, DType kOperand>
KernelEntry kernel_entry(bool fp32_output, bool scale_bias, int variant) {
  using T = Element<kOperand>;
  return dispatch_bools(fp32_output, scale_bias, [&](auto is_fp32, auto scales) {
    using Out = std::conditional_t<decltype(is_fp32)::value, float, T>;
    return [&]<size_t... kVariants>(std::index_sequence<kVariants...>) {
      const KernelEntry entries[] = {
          entry_of_variant<kLayout, T, Out, decltype(scales)::value, kTileVariants[kVariants]>()...};
      return entries[variant];
    }(std::make_index_sequence<kTileVariantCount>());
  });
}

}  // namespace fusible
