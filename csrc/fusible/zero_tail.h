// Zeroes the rows of a token buffer that belong to no group. Reads the group sizes on the device, so it can be captured in a graph.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fusible {

struct TokenRows {
  void* data;
  int64_t tokens, row_bytes, pitch_bytes;
};

struct SplitSizes {
  const void* sizes;  // on the device, int32 or (wide) int64
  int groups;
  bool wide;
};

// Throws fusible::Error if the launch fails. Bytes between the rows of a pitched buffer are not touched.
void zero_tail(const TokenRows& rows, const SplitSizes& sizes, int device, cudaStream_t stream);

}  // namespace fusible
