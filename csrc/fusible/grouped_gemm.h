// SPDX-License-Identifier: Apache-2.0
// The public C++ API of the grouped GEMM. Asynchronous on the given stream; nothing is allocated and nothing on the
// device is read by the host, so a launch can be captured in a graph and replayed with other group sizes.
#pragma once
#include <cuda_runtime_api.h>

#include "fusible/tensor_map.h"
#include "fusible/zeroing.h"

namespace fusible {

// out[t, :] = row_scale[t] * (alpha[g] * (a b)[t, :] + bias_scale[t] * bias[g, :]). Null: ones (scales), zeros (bias);
// where `alphas` [E] is null, `alpha` holds for every group. kTN takes alpha and bias alone.
struct EpilogueArguments {
  MatrixView bias{};  // [E, n], `pitch` from one to the next, or wherever `addresses` say
  const float* row_scale = nullptr;
  const float* bias_scale = nullptr;
  const float* alphas = nullptr;
  float alpha = 1;
};

// Bytes of device memory that a launch needs for itself while it runs; any contents, aligned to 16 bytes.
int64_t workspace_bytes(int64_t groups);
// The same with the room without which the depth of long groups is not split.
int64_t split_k_workspace_bytes(int64_t groups);

struct GroupedGemm {
  GemmProblem problem;
  MatrixView a, b, out;
  MatrixView second_a{}, second_b{};  // where problem.second_k says so; b in the layout of the first, as one tensor
  SplitSizes sizes;                   // of problem.groups groups
  EpilogueArguments epilogue;
  bool accumulate = false;       // out = beta * out + ... rather than out = ...
  const float* betas = nullptr;  // [E], on the device; null: `beta` for all groups
  float beta = 1;
  void* workspace =
      nullptr;  // null: a static schedule, which is slower where groups differ much; needed where matrices lie anywhere
  int64_t workspace_bytes = 0;  // where there may be room for more than the least
  int variant = -1;             // a tile variant instead of the cost model's
  bool zero_tail = false;  // rows of `out` of no group become zero; of products other than kTN, whose groups have sizes
  bool zeroed = false;     // already done, and the workspace's counter zeroed: see zero_before
  // For independent products (fusible/independent.h): the workspaces of the products launched next, and whether this
  // one follows another, which has zeroed its counter.
  std::span<const uintptr_t> followers{};
  bool follows = false;
  GroupWindow run{};  // the groups of this call, and of `b`; none: all groups, as under kTN
};

// Notes the memory that the call must find zeroed, and lets it rely on that, so that consecutive calls share one
// zeroing kernel. Nothing before the call may write the rows of `out`.
void zero_before(GroupedGemm& call, Zeroing& zeroing);

// Throws fusible::Error, with the problem and the configuration in the message. Rows of `out` outside of every group
// are not touched, unless they must be zeroed; an empty group's weight gradient is zero (or beta times what it was when
// accumulating). Old values of `out` are not read if beta is 0; if beta is neither 0 nor 1, they are rounded once more
// to their type before the product is added.
void grouped_gemm(const GroupedGemm& call, int device, cudaStream_t stream);

}  // namespace fusible
