// SPDX-License-Identifier: Apache-2.0
// Tokens to experts and back. Each of T tokens has k slots, each slot an expert; the rows of the experts are the T k
// slots, sorted by expert, in the order of the slots within one. Everything is decided on the device, can be captured
// in a graph, and is bitwise the same from run to run: a row has one writer, and a sum one order.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/activation.h"
#include "fusible/groups.h"

namespace fusible {

// Finds the row of each slot. Ids below 0 or from `groups` on are of no expert: their rows come last.
struct Route {
  const void* ids;  // [slots], int32 or int64
  bool int64_ids;
  int64_t slots;  // T k
  int groups;
  RowScale weights;  // [slots], of no concern here but for `scales`
  int32_t* sizes;    // [groups + 1]: the rows of each expert; last, those of all experts together
  int32_t* order;    // [slots]: the slot of each row; null if not wanted
  int32_t* place;    // [slots]: the row of each slot
  float* scales;     // [slots]: the weight of each row; null if not wanted
  int32_t* counts;   // route_workspace_bytes(slots, groups)
};

// The rows of the tokens, and those of the experts, `pitch` elements apart.
struct RoutedRows {
  DType type;
  int64_t tokens, columns;
  int slots;             // k, of one token
  const int32_t* place;  // [tokens, slots]
  const int32_t* all;    // how many rows the experts have; the others are of no expert
  const void* from;
  int64_t from_pitch;
  void* to;
  int64_t to_pitch;
};

int64_t route_workspace_bytes(int64_t slots, int groups);

// All throw fusible::Error if a launch fails.
void route(const Route& call, int device, cudaStream_t stream);
// Copies each token's row, `from`, to its rows of the experts. Rows of no expert become zero with `fill`, else they
// stay as they are.
void spread_rows(const RoutedRows& call, bool fill, int device, cudaStream_t stream);
// Each token's row is the sum of its rows of the experts, `from`, in fp32, in the order of the slots, rounded once.
void sum_rows(const RoutedRows& call, int device, cudaStream_t stream);
// Of each slot the number of its row, rounded to the type of `to`; 0 for those of no expert.
void numbers_of_slots(const float* rows, const int32_t* place, const int32_t* all, int64_t slots, void* to, DType type,
                      int device, cudaStream_t stream);

}  // namespace fusible
