// SPDX-License-Identifier: Apache-2.0
// Products of a few rows of bf16 and weights of 8 or 4 bits, which are decoded in registers.
#pragma once
#include <cuda_runtime_api.h>

#include "fusible/grouped_gemm.h"

namespace fusible {

enum class PackedFormat : int { kMXFP8 = 0, kNVFP4 = 1, kMXFP4 = 2 };

// out[t, :] = row_scale[t] * (alphas[g] * (a[t] b[g]^T) + bias_scale[t] * bias[g, :]), for the rows t of each group g;
// a null pointer stands for ones or zeros. Any number of rows is right, and few of each group are fast.
struct PackedGemm {
  PackedFormat format;
  int64_t tokens, n, k;
  const void* a;  // bf16 [tokens, k]; rows aligned to 16 bytes
  int64_t a_pitch;
  const uint8_t *b, *b_scales;  // [E, n, k] of 8 or 4 bits, the first value in the low bits; [E, n, blocks of k]
  SplitSizes sizes;
  DType output;
  void* out;
  int64_t out_pitch;
  const void* bias;  // [E, n]
  DType bias_type;
  const float *bias_scale, *row_scale, *alphas;
  bool zero_tail;  // rows of `out` of no group become zero
};

// Throws fusible::Error if rows of b are not aligned to 16 bytes, or the launch fails.
void packed_gemm(const PackedGemm& call, int device, cudaStream_t stream);

}  // namespace fusible
