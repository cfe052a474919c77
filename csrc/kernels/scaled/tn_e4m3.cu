// SPDX-License-Identifier: Apache-2.0
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {

KernelEntry scaled_wgrad_entry(DType out, int variant) {
  constexpr std::make_index_sequence<std::size(kScaledWgradVariants)> kAll;
  return dispatch_dtype(
      out, [&](auto type) { return scaled_wgrad_entry_of<Element<decltype(type)::value>>(variant, kAll); });
}

}  // namespace fusible
