// SPDX-License-Identifier: Apache-2.0
// A launch of a kernel that another compiler has made and loaded, as Triton does: its parameters come as values.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/fields.h"

namespace fusible {

// How a parameter of a foreign kernel is passed.
enum class Parameter : int64_t { kNumber, kAddress, kTensorMap };

// Addresses are those of parameters and of tensor maps, in the order of the parameters; numbers are their first bits.
// A map has in `maps`: its type, swizzle, promotion and fill as the driver numbers them, the number of dimensions, then
// their sizes and those of the box in elements, innermost first, and the strides of the others in bytes.
struct ForeignKernel {
  int64_t function;  // a CUfunction of the device; no address of the call: a replay keeps it
  int64_t blocks_x, blocks_y;
  int threads, shared_bytes;
  Numbers parameters, numbers, maps;
  Addresses addresses;
};

void launch_foreign(const ForeignKernel& kernel, int device, cudaStream_t stream);

}  // namespace fusible
