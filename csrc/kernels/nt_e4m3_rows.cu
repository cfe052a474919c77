// SPDX-License-Identifier: Apache-2.0
// Products of e4m3 operands with scales of whole rows.
#include "device/row_scaling.cuh"
#include "kernels/instantiate_scaled.cuh"

namespace fusible {
namespace {

template <class Out, class Scaling, int kVariant>
using RowScaledKernel =
    GroupedGemmKernel<TokenRows<E4M3>, WeightRows<E4M3, kRowScaledVariants[kVariant].tile_n>, Out, true,
                      kRowScaledVariants[kVariant], StoreEpilogue, TokenGroups, Scaling>;

}  // namespace

KernelEntry row_scaled_entry(DType out, bool fast, int variant) {
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    if (fast) return variant == 0 ? entry_of<RowScaledKernel<Out, FastRowScaling, 0>>() : KernelEntry{};
    return variant == 0 ? entry_of<RowScaledKernel<Out, RowScaling, 0>>()
                        : entry_of<RowScaledKernel<Out, RowScaling, 1>>();
  });
}

}  // namespace fusible
