#include "kernels/kernel_entry.h"

namespace fusible {

KernelEntry find_kernel(const GemmProblem& p, int variant) {
  const bool wide = p.output == DType::kFloat32, bf16 = p.operand == DType::kBFloat16;
  switch (p.layout) {
    case Layout::kNT:
      return bf16 ? kernel_entry<Layout::kNT, DType::kBFloat16>(wide, p.affine, variant)
                  : kernel_entry<Layout::kNT, DType::kFloat16>(wide, p.affine, variant);
    case Layout::kNN:
      return bf16 ? kernel_entry<Layout::kNN, DType::kBFloat16>(wide, p.affine, variant)
                  : kernel_entry<Layout::kNN, DType::kFloat16>(wide, p.affine, variant);
    default:
      return bf16 ? kernel_entry<Layout::kTN, DType::kBFloat16>(wide, p.affine, variant)
                  : kernel_entry<Layout::kTN, DType::kFloat16>(wide, p.affine, variant);
  }
}

}  // namespace fusible
