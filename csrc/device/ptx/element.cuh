// SPDX-License-Identifier: Apache-2.0
// The types of elements that DType stands for, and single elements of a type that is known when the kernel runs.
#pragma once
#include <type_traits>

#include "device/ptx/ptx.cuh"
#include "fusible/dtype.h"

namespace fusible {

// A byte that the tensor cores read: sign, four bits of exponent, three of fraction. No code converts it.
struct E4M3 {
  uint8_t bits;
};

template <DType kType>
using Element = std::conditional_t<
    kType == DType::kBFloat16, __nv_bfloat16,
    std::conditional_t<kType == DType::kFloat16, __half, std::conditional_t<kType == DType::kE4M3, E4M3, float>>>;

DEVICE float read_number(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::kFloat32: return static_cast<const float*>(data)[i];
    case DType::kFloat16: return __half2float(static_cast<const __half*>(data)[i]);
    default: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  }
}
DEVICE void write_number(void* data, DType type, int64_t i, float x) {
  switch (type) {
    case DType::kFloat32: static_cast<float*>(data)[i] = x; break;
    case DType::kFloat16: static_cast<__half*>(data)[i] = __float2half(x); break;
    default: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(x);
  }
}

}  // namespace fusible
