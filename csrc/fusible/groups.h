// SPDX-License-Identifier: Apache-2.0
// How long the groups are, which the device alone knows.
#pragma once
#include <cstdint>

namespace fusible {

inline constexpr int kMaxGroups = 4096;
// A product keeps a table of its groups in shared memory. One of more groups is as many launches as it has windows.
inline constexpr int kGroupsOfWindow = 512;
constexpr int windows_of(int64_t groups) { return static_cast<int>((groups + kGroupsOfWindow - 1) / kGroupsOfWindow); }

// Groups that a launch is for.
struct GroupWindow {
  int first, count;
};

// Sizes of consecutive groups of a buffer: int32 or int64, in device memory. Sizes that exceed the buffer are cut when
// they are read (device/gemm/groups.cuh).
struct SplitSizes {
  const void* sizes;
  int groups;
  bool int64_sizes;
  uint64_t* wrong = nullptr;  // where a kernel reports sizes that do not fit (fusible/wrong_sizes.h); null: nowhere
};

}  // namespace fusible
