// SPDX-License-Identifier: Apache-2.0
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {

KernelEntry scaled_entry(DType out, bool scale_bias) {
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    return scale_bias ? entry_of<ScaledKernel<Out, true>>() : entry_of<ScaledKernel<Out, false>>();
  });
}

KernelEntry scaled_halves_entry(DType out, bool scale_bias) {
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    return scale_bias ? entry_of<ScaledHalvesKernel<Out, true>>() : entry_of<ScaledHalvesKernel<Out, false>>();
  });
}

}  // namespace fusible
