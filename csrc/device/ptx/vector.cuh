// SPDX-License-Identifier: Apache-2.0
// Neighbouring values that move at once, and their conversion to floats and back.
#pragma once
#include <initializer_list>

#include "device/ptx/ptx.cuh"

namespace fusible {

// Whether rows can be moved in vectors of `count` elements, which are 16 bytes: all these numbers of elements are
// multiples of it, and all these addresses of 16 bytes.
inline bool vectors_fit(int64_t count, std::initializer_list<int64_t> elements,
                        std::initializer_list<const void*> addresses) {
  for (const int64_t number : elements)
    if (number % count != 0) return false;
  for (const void* address : addresses)
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return false;
  return true;
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vector {
  T values[kCount];
};

template <class T, int kCount>
DEVICE Vector<T, kCount> read_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}

// Two to eight values of 16 bits are converted in pairs.
template <class T, int kCount>
DEVICE void convert(float (&to)[kCount], const Vector<T, kCount>& from) {
  if constexpr (sizeof(T) == 2 && kCount > 1) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 pair = ptx::unpack<T>(reinterpret_cast<const uint32_t*>(from.values)[i / 2]);
      to[i] = pair.x, to[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = static_cast<float>(from.values[i]);
  }
}
template <class T, int kCount>
DEVICE void load(float (&to)[kCount], const T* from) {
  convert(to, read_vector<T, kCount>(from));
}

// Eight values of 16 bits that are in registers.
template <class T>
DEVICE void convert_words(float (&to)[8], const uint4& words) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ptx::unpack<T>(all[i]);
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}
template <class T>
DEVICE uint4 rounded_words(const float (&x)[8]) {
  return {ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]), ptx::pack<T>(x[4], x[5]), ptx::pack<T>(x[6], x[7])};
}

template <class T, int kCount>
DEVICE void store(T* to, const float (&from)[kCount]) {
  if constexpr (sizeof(T) == 2 && kCount == 8) {
    ptx::store_vector(to, rounded_words<T>(from));
  } else if constexpr (sizeof(T) == 4 && kCount == 4) {
    const auto bits = [&](int i) INLINE { return __float_as_uint(from[i]); };
    ptx::store_vector(to, {bits(0), bits(1), bits(2), bits(3)});
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = static_cast<T>(from[i]);
  }
}

}  // namespace fusible
