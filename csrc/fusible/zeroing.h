// SPDX-License-Identifier: Apache-2.0
// Memory that kernels need zeroed: counters, and the tails of token buffers (rows past the last group). One kernel
// zeroes all of it. Group sizes are read on the device, so it can be captured in a graph.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "fusible/groups.h"

namespace fusible {

// Bytes between the rows of a pitched buffer are not touched.
struct BufferRows {
  void* data;
  int64_t tokens, row_bytes, pitch_bytes;
};

// Zeroing before several launches may read sizes that one of them is yet to write: the rows are then zeroed later, and
// the sizes must not be reported.
struct Tail {
  BufferRows rows;
  SplitSizes sizes;
};

// Numbers that follow one another.
struct Counters {
  unsigned* first;
  int count = 1;
};

struct Zeroing {
  std::vector<Counters> counters;
  std::vector<Tail> tails;
};

// Throws fusible::Error if a launch fails. Launches nothing for empty inputs.
void zero(const Zeroing& zeroing, int device, cudaStream_t stream);

}  // namespace fusible
