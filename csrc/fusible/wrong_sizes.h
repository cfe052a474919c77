// SPDX-License-Identifier: Apache-2.0
// What kernels tell the host of split sizes that do not fit, which the device alone knows. Each device has one word of
// pinned memory, which kernels write and which the host reads without waiting. So it works in graphs and their replays.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusible {

enum class SizesOf : unsigned { kRows, kMatrices };  // of a token buffer; of matrices one after the other

// One word, so that it is never half written. The size is saturated.
struct WrongSize {
  SizesOf what;
  int group;
  int64_t size;

  static constexpr int kSizeBits = 48;
  static constexpr int64_t kMost = (int64_t{1} << (kSizeBits - 1)) - 1;

  // Never zero.
  __host__ __device__ constexpr uint64_t word() const {
    const int64_t saturated = size > kMost ? kMost : size < -kMost ? -kMost : size;
    return uint64_t{1} << 63 | static_cast<uint64_t>(what) << 62 | static_cast<uint64_t>(group) << kSizeBits |
           (static_cast<uint64_t>(saturated) & ((uint64_t{1} << kSizeBits) - 1));
  }
  static constexpr WrongSize of(uint64_t word) {
    constexpr int kAbove = 64 - kSizeBits;
    return {static_cast<SizesOf>(word >> 62 & 1), static_cast<int>(word >> kSizeBits & 0x3FFF),
            static_cast<int64_t>(word << kAbove) >> kAbove};
  }
};

// Where kernels on a device write the word; null for devices that have none. Allocated by the first call.
uint64_t* wrong_size_word(int device);

// Throws fusible::Error if a kernel on the device has reported a size since the last call, for this call alone. Waits
// for no kernel.
void raise_wrong_sizes(int device);

}  // namespace fusible
