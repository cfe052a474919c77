// SPDX-License-Identifier: Apache-2.0
// A grouped GEMM whose groups have shapes of their own on both sides, which only the device knows. Asynchronous on the
// given stream, as grouped_gemm is; nothing is allocated, and a launch can be captured and replayed with other shapes.
#pragma once
#include "fusible/grouped_gemm.h"
#include "kernels/ragged/ragged.h"

namespace fusible {

// Bytes of device memory that a launch needs for itself while it runs; any contents, any alignment.
int64_t ragged_workspace_bytes(int64_t groups);

// out_g[m, n] = alpha_g * a_g b_g + bias_g, with a_g[m, k] (kTN: [k, m]) and b_g[k, n] (kNT: [n, k]), all of them
// packed one after the other.
struct RaggedGemm {
  Layout layout;
  DType operand, output;
  int64_t groups;
  PackedMatrices a, b;
  void* out;
  int64_t out_elements;
  EpilogueArguments epilogue;    // alpha, and a bias where all groups have the same columns
  bool accumulate = false;       // out = beta * out + ... rather than out = ...
  bool zero_tail = false;        // elements of no group are zeroed
  const float* betas = nullptr;  // [groups], on the device; null: `beta` for all groups
  float beta = 1;
  void* workspace = nullptr;
};

// Throws fusible::Error. If the depths of a group differ, the smaller one counts. If a group does not fit into the
// tensors, nothing outside of them is touched: without operands its result is that of depth 0, without an output it is
// left out.
void ragged_gemm(const RaggedGemm& call, int device, cudaStream_t stream);

}  // namespace fusible
