#include "kernels/instantiate_activation.cuh"

namespace fusible {
template KernelEntry activation_backward_entry<Layout::kNN, DType::kBFloat16>(int);
}  // namespace fusible
