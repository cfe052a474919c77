"""The parts of the C++ standard library and of CUDA's headers that device code includes.

NVRTC then reads nothing from disk: neither a host compiler nor CUDA's headers have to be installed.
"""

_INTEGERS = {
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long",
    "uint64": "unsigned long",
    "uintptr": "unsigned long",
}

_TYPE_TRAITS = """#pragma once
namespace std {
template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  constexpr operator T() const { return v; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool c, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool c, class A, class B> using conditional_t = typename conditional<c, A, B>::type;
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
}
"""

_TENSOR_MAP = """#pragma once
#ifndef TENSOR_MAP_ALIGNMENT
#define TENSOR_MAP_ALIGNMENT 64
#endif
struct alignas(TENSOR_MAP_ALIGNMENT) CUtensorMap { unsigned long opaque[16]; };
"""
"""64 before CUDA 13, 128 since: as the host has it, or parameters lie elsewhere."""

_FLOAT16 = """#pragma once
struct __half {
  unsigned short bits;
  __half() = default;
  explicit __half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  operator float() const { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
};
struct __half2 { __half x, y; };
inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return __half(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
"""

_BFLOAT16 = """#pragma once
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return reinterpret_cast<__nv_bfloat162&>(pair);
}
"""

_CONCEPTS = """#pragma once
#include <type_traits>
namespace std {
template <class A, class B> concept same_as = is_same_v<A, B>;
template <class A, class B> concept convertible_to = requires(A (&from)()) { static_cast<B>(from()); };
template <class A, class B> concept derived_from = __is_base_of(B, A);
}
"""

SHIMS = {
    "cstdint": "#pragma once\n" + "".join(f"typedef {kind} {name}_t;\n" for name, kind in _INTEGERS.items()),
    "type_traits": _TYPE_TRAITS,
    "concepts": _CONCEPTS,
    "iosfwd": "#pragma once\nnamespace std { class ostream; }\n",
    "cuda.h": _TENSOR_MAP,
    "initializer_list": "#pragma once\n",  # NVRTC defines it
    "cuda_fp16.h": _FLOAT16,
    "cuda_bf16.h": _BFLOAT16,
}
