// SPDX-License-Identifier: Apache-2.0
// The check of the C++ core. Python sees its exception as a RuntimeError. Sources of kernels include this, and streams
// and strings would take a third of the time of a small one: error.cpp has them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <type_traits>

namespace fusible {

// A part of an error's text: words, a whole number, or what has an operator<<. It refers to the value.
class Part {
 public:
  Part(const char* words) : value_(words), write_(nullptr) {}
  template <class T>
    requires std::is_integral_v<T>
  Part(T number) : number_(static_cast<int64_t>(number)), write_(nullptr) {}
  template <class T>
    requires std::is_class_v<T>
  Part(const T& value)
      : value_(&value), write_([](std::ostream& out, const void* at) { out << *static_cast<const T*>(at); }) {}
  void write(std::ostream& out) const;

 private:
  const void* value_ = nullptr;
  int64_t number_ = 0;
  void (*write_)(std::ostream& out, const void* value);
};

// Throws fusible::Error (error.cpp).
[[noreturn]] void fail(const char* file, int line, const char* condition, std::initializer_list<Part> parts);
[[noreturn]] void fail(const char* text);

}  // namespace fusible

// FUSIBLE_CHECK(k % 8 == 0, "k must be a multiple of 8, got ", k);
#define FUSIBLE_CHECK(condition, ...)                                                 \
  do {                                                                                \
    if (!(condition)) ::fusible::fail(__FILE__, __LINE__, #condition, {__VA_ARGS__}); \
  } while (0)

// FUSIBLE_CUDA_CHECK(cudaLaunchKernelExC(...), config): the runtime's error text, then the caller's words.
#define FUSIBLE_CUDA_CHECK(call, ...)                                                                     \
  do {                                                                                                    \
    const cudaError_t status_ = (call);                                                                   \
    if (status_ != cudaSuccess) {                                                                         \
      (void)cudaGetLastError(); /* not sticky: the next call of this thread starts clean */               \
      ::fusible::fail(__FILE__, __LINE__, #call,                                                          \
                      {cudaGetErrorName(status_), ": ", cudaGetErrorString(status_), ". ", __VA_ARGS__}); \
    }                                                                                                     \
  } while (0)
