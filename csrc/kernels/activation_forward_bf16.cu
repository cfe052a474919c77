#include "kernels/instantiate_activation.cuh"

namespace fusible {
template KernelEntry activation_entry<DType::kBFloat16>(bool, bool, int);
}  // namespace fusible
