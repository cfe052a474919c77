// SPDX-License-Identifier: Apache-2.0
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {

KernelEntry scaled_entry(DType out, bool scale_bias, bool halves) {
  return dispatch_dtype(out, [&](auto type) {
    return dispatch_bools(scale_bias, halves, [](auto scales, auto has_halves) {
      using Epilogue = std::conditional_t<has_halves.value, HalvesStoreEpilogue, StoreEpilogue>;
      return scaled_rows_entry<Element<decltype(type)::value>, scales.value, Scaling1D2D, Epilogue, has_halves.value>();
    });
  });
}

}  // namespace fusible
