// SPDX-License-Identifier: Apache-2.0
// Types of elements as values, and the step from such a value to code that is compiled for it.
#pragma once
#include <cstdint>
#include <type_traits>

namespace fusible {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kE4M3 = 3 };

constexpr int64_t bytes_of(DType type) { return type == DType::kFloat32 ? 4 : type == DType::kE4M3 ? 1 : 2; }

// Calls body(std::integral_constant<..., k>()) with the choice k equal to `value`, or with the last one if none is.
template <auto kFirst, auto... kOthers, class Body>
decltype(auto) dispatch(decltype(kFirst) value, const Body& body) {
  if constexpr (sizeof...(kOthers) > 0)
    if (value != kFirst) return dispatch<kOthers...>(value, body);
  return body(std::integral_constant<decltype(kFirst), kFirst>());
}

// The same for a pair of facts.
template <class Body>
decltype(auto) dispatch_bools(bool first, bool second, const Body& body) {
  return dispatch<true, false>(
      first, [&](auto a) { return dispatch<true, false>(second, [&](auto b) { return body(a, b); }); });
}

template <class Body>
decltype(auto) dispatch_dtype(DType type, const Body& body) {
  return dispatch<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(type, body);
}
// The dispatch for operands.
template <class Body>
decltype(auto) dispatch_dtype_of_16_bits(DType type, const Body& body) {
  return dispatch<DType::kFloat16, DType::kBFloat16>(type, body);
}

}  // namespace fusible
