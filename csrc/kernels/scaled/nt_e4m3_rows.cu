// SPDX-License-Identifier: Apache-2.0
// Products of e4m3 operands with scales of whole rows.
#include "device/gemm/row_scaling.cuh"
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {
namespace {

template <class Out, class Scaling>
using RowScaledKernel = GroupedGemmKernel<TokenRows<E4M3>, WeightRows<E4M3, kScaledVariant.tile_n>, Out, true,
                                          kScaledVariant, StoreEpilogue, TokenGroups, Scaling>;

}  // namespace

KernelEntry row_scaled_entry(DType out, bool fast) {
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    return fast ? entry_of<RowScaledKernel<Out, FastRowScaling>>() : entry_of<RowScaledKernel<Out, RowScaling>>();
  });
}

}  // namespace fusible
