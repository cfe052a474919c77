// SPDX-License-Identifier: Apache-2.0
// How long the groups are, which the device alone knows.
#pragma once
#include <cstdint>

namespace fusible {

inline constexpr int kMaxGroups = 512;

// Sizes of groups that follow one another in a buffer: int32 or int64, in device memory. Whatever stands there, what
// exceeds the buffer is cut off where the sizes are read (device/gemm/groups.cuh).
struct SplitSizes {
  const void* sizes;
  int groups;
  bool int64_sizes;
  uint64_t* wrong = nullptr;  // where a kernel reports sizes that do not fit (fusible/wrong_sizes.h); null: nowhere
};

}  // namespace fusible
