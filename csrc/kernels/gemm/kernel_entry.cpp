// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/kernel_entry.h"

namespace fusible {

namespace {

KernelEntry find_pair_kernel(const GemmProblem& p, int variant) {
  return dispatch<Layout::kNT, Layout::kNN>(p.layout, [&](auto layout) {
    return dispatch_dtype_of_16_bits(p.operand, [&](auto operand) {
      return pair_entry<decltype(layout)::value, decltype(operand)::value>(p.scale_bias, variant);
    });
  });
}

}  // namespace

KernelEntry find_kernel(const GemmProblem& p, int variant) {
  if (p.second_k) return find_pair_kernel(p, variant);
  return dispatch<Layout::kNT, Layout::kNN, Layout::kTN>(p.layout, [&](auto layout) {
    return dispatch_dtype_of_16_bits(p.operand, [&](auto operand) {
      return kernel_entry<decltype(layout)::value, decltype(operand)::value>(p.output == DType::kFloat32, p.scale_bias,
                                                                             variant);
    });
  });
}

}  // namespace fusible
