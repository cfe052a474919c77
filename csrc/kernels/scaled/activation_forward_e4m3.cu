// SPDX-License-Identifier: Apache-2.0
#include "device/epilogue/epilogue_quantized_activation.cuh"
#include "kernels/scaled/instantiate_scaled.cuh"

namespace fusible {
namespace {

template <class Out, bool kHalves, bool kScaleBias>
KernelEntry scaled_activation_entry_of() {
  constexpr int kTileN = kScaledVariant.tile_n;
  using B = std::conditional_t<kHalves, GateUpRows<E4M3, kTileN>, WeightRows<E4M3, kTileN>>;
  return entry_of<GroupedGemmKernel<TokenRows<E4M3>, B, Out, kScaleBias, kScaledVariant,
                                    QuantizedActivationEpilogue<kHalves>, TokenGroups, Scaling1D2D>>();
}

}  // namespace

KernelEntry scaled_activation_entry(DType out, bool halves, bool scale_bias) {
  return dispatch_dtype_of_16_bits(out, [&](auto type) {
    using Out = Element<decltype(type)::value>;
    if (halves)
      return scale_bias ? scaled_activation_entry_of<Out, true, true>()
                        : scaled_activation_entry_of<Out, true, false>();
    return scale_bias ? scaled_activation_entry_of<Out, false, true>()
                      : scaled_activation_entry_of<Out, false, false>();
  });
}

}  // namespace fusible
