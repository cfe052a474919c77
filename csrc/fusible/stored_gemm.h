// SPDX-License-Identifier: Apache-2.0
// Products of rows of bf16 and weights of 4 bits as they are stored (MXFP4), which are decoded in registers: for more
// rows than those of packed_gemm.h, and for the gradient of rows.
#pragma once
#include "fusible/grouped_gemm.h"

namespace fusible {

// out[t, :] = the epilogue of (a b)[t, :], plus the product of a second pair, whose depth is at most 64. Weights are
// stored as [E, N, K / 2] and [E, N, K / 32]: kNT contracts them over K, kNN over N. kNN has no bias and no factors.
struct StoredGemm {
  GroupedGemm gemm;  // of bf16; `b`: the bytes, one tensor
  const uint8_t* scales;
};

inline constexpr int kMostSecondDepth = 64;

// Throws fusible::Error, with the problem and the configuration in the message.
void stored_gemm(const StoredGemm& call, int device, cudaStream_t stream);

}  // namespace fusible
