// SPDX-License-Identifier: Apache-2.0
// Rows of a buffer that come while a kernel that reads them runs.
#pragma once
#include <cstdint>

namespace fusible {

inline constexpr int kArrivalRows = 64;  // rows of a block, which is announced as a whole

struct Arrivals {
  uint32_t* blocks;  // how many pieces of each block of rows are there; null: all rows are
  int pieces;        // of a block whose rows are all there
};

// Behind the parameters of the kernel that waits for nothing.
template <class Params>
struct WithArrivals : Params {
  Arrivals arrivals;
};

}  // namespace fusible
