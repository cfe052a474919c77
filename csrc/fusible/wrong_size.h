// SPDX-License-Identifier: Apache-2.0
// The word by which a kernel reports a wrong split size, shared by device and host. No CUDA here.
#pragma once
#include <cstdint>

namespace fusible {

enum class SizesOf : unsigned { kRows, kMatrices };  // of a token buffer; of matrices one after the other

// One word, so that it is never half written. The size is saturated.
struct WrongSize {
  SizesOf sizes;
  int group;
  int64_t size;

  static constexpr int kSizeBits = 48;
  static constexpr int64_t kMost = (int64_t{1} << (kSizeBits - 1)) - 1;

  static constexpr WrongSize of(uint64_t word) {
    constexpr int kAbove = 64 - kSizeBits;
    return {static_cast<SizesOf>(word >> 62 & 1), static_cast<int>(word >> kSizeBits & 0x3FFF),
            static_cast<int64_t>(word << kAbove) >> kAbove};
  }
};

}  // namespace fusible
