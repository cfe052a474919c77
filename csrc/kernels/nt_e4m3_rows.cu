// SPDX-License-Identifier: Apache-2.0
// Products of e4m3 operands with scales of whole rows.
#include "device/row_scaling.cuh"
#include "kernels/instantiate_scaled.cuh"

namespace fusible {
namespace {

template <class Out, class Scaling, TileVariant kVariant>
using RowScaledKernel =
    GroupedGemmKernel<TokenRows<E4M3>, WeightRows<E4M3, kVariant.tile_n>, Out, true, kVariant, StoreEpilogue,
                      TokenGroups, Scaling>;

template <class Out, class Scaling, int kVariant>
KernelEntry entry_of_row_variant() {
  if constexpr (kVariant > 0 && !std::is_same_v<Out, __nv_bfloat16>) return {};
  else return entry_of<RowScaledKernel<Out, Scaling, kRowScaledVariants[kVariant]>>();
}
template <class Out, class Scaling, size_t... kVariants>
KernelEntry entry_of_rows(int variant, std::index_sequence<kVariants...>) {
  const KernelEntry entries[] = {entry_of_row_variant<Out, Scaling, kVariants>()...};
  return entries[variant];
}

}  // namespace

KernelEntry row_scaled_entry(DType out, bool fast, int variant) {
  constexpr std::make_index_sequence<std::size(kRowScaledVariants)> kAll;
  return dispatch_dtype(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    return fast ? entry_of_rows<Out, FastRowScaling>(variant, kAll) : entry_of_rows<Out, RowScaling>(variant, kAll);
  });
}

}  // namespace fusible
