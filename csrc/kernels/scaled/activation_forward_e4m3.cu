// SPDX-License-Identifier: Apache-2.0
#include "device/epilogue/epilogue_quantized_activation.cuh"
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {

KernelEntry scaled_activation_entry(DType out, bool halves, bool scale_bias) {
  return dispatch_dtype_of_16_bits(out, [&](auto type) {
    return dispatch_bools(halves, scale_bias, [](auto has_halves, auto scales) {
      return scaled_rows_entry<Element<decltype(type)::value>, scales.value, Scaling1D2D,
                               QuantizedActivationEpilogue<has_halves.value>, has_halves.value>();
    });
  });
}

}  // namespace fusible
