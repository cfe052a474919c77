// SPDX-License-Identifier: Apache-2.0
// Products of e4m3 operands with scales of whole rows.
#include "device/gemm/row_scaling.cuh"
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {

KernelEntry row_scaled_entry(DType out, bool fast) {
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    return fast ? scaled_rows_entry<Out, true, FastRowScaling>() : scaled_rows_entry<Out, true, RowScaling>();
  });
}

}  // namespace fusible
