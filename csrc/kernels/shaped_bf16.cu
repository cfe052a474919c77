#include "kernels/instantiate_shaped.cuh"

namespace fusible {
template KernelEntry shaped_entry<DType::kBFloat16>(Layout, bool);
}  // namespace fusible
