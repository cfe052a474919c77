// SPDX-License-Identifier: Apache-2.0
// Passes over rows sorted by group that read each row once, for all results of a low-rank adapter: the row itself,
// gathered from those of the tokens; its product with a factor of the adapter; its share of a factor's gradient. Group
// sizes are read on the device, so a pass can be captured in a graph. It is bitwise the same from run to run.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/gemm_config.h"
#include "fusible/group_rows.h"
#include "fusible/groups.h"

namespace fusible {

inline constexpr int kMaxLowRank = 64;

// Factors and their gradients are dense [groups, rank, columns], or [groups, columns, rank] with `by_columns`.
// Addresses are null for absent operands and unwanted results.
struct LowRankPass {
  DenseRows rows;  // 16-bit, in vectors of 16 bytes; `tokens` counts those of the groups, with their tail
  SplitSizes sizes;
  int64_t rank;  // a multiple of 8, up to kMaxLowRank
  bool by_columns;
  const int32_t* slot_of_row;  // row t is row slot_of_row[t] / top_k of what `rows` points to; null: row t
  int top_k;
  void* gathered;      // [tokens, columns], dense: the rows
  const void* factor;  // and with it
  void* product;       // [tokens, rank]: the rows times it
  const void* low;     // [tokens, rank], and with it
  void* gradient;      // as a factor: the sum over a group's rows of row times `low`; zero for an empty group
  DType gradient_type;
  void* workspace;  // low_rank_workspace() bytes
};

// The workspace for rows whose `gradient` is wanted, or not.
int64_t low_rank_workspace(int64_t tokens, int64_t columns, int64_t rank, bool gradient, int device);

// Rows past the last group are neither read nor written. Throws fusible::Error if a launch fails.
void low_rank_pass(const LowRankPass& call, int device, cudaStream_t stream);

}  // namespace fusible
