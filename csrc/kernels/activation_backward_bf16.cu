#include "kernels/instantiate_activation.cuh"

namespace fusible {
template KernelEntry activation_backward_entry<DType::kBFloat16>(int);
}  // namespace fusible
