// SPDX-License-Identifier: Apache-2.0
// The one exception of the C++ core, and the check that throws it. Python sees a RuntimeError.
#pragma once
#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace fusible {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void fail(const char* file, int line, const char* condition, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  text << " [" << condition << " at " << file << ":" << line << "]";
  throw Error(text.str());
}

}  // namespace fusible

// FUSIBLE_CHECK(k % 8 == 0, "k must be a multiple of 8, got ", k);
#define FUSIBLE_CHECK(condition, ...)                                               \
  do {                                                                              \
    if (!(condition)) ::fusible::fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (0)

// FUSIBLE_CUDA_CHECK(cudaLaunchKernelExC(...), config): the runtime's error text, then the caller's words.
#define FUSIBLE_CUDA_CHECK(call, ...)                                                                                \
  do {                                                                                                               \
    const cudaError_t status_ = (call);                                                                              \
    if (status_ != cudaSuccess) {                                                                                    \
      (void)cudaGetLastError(); /* not sticky: the next call of this thread starts clean */                          \
      ::fusible::fail(__FILE__, __LINE__, #call, cudaGetErrorName(status_), ": ", cudaGetErrorString(status_), ". ", \
                      __VA_ARGS__);                                                                                  \
    }                                                                                                                \
  } while (0)
