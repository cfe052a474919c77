// SPDX-License-Identifier: Apache-2.0
#include "kernels/instantiate_scaled.cuh"

namespace fusible {

KernelEntry scaled_entry(DType out, bool scale_bias, int variant) {
  constexpr std::make_index_sequence<std::size(kScaledVariants)> kAll;
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    return scale_bias ? scaled_entry_of<Out, true>(variant, kAll) : scaled_entry_of<Out, false>(variant, kAll);
  });
}

KernelEntry scaled_halves_entry(DType out, bool scale_bias) {
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    return scale_bias ? entry_of<ScaledHalvesKernel<Out, true>>() : entry_of<ScaledHalvesKernel<Out, false>>();
  });
}

}  // namespace fusible
