// SPDX-License-Identifier: Apache-2.0
// Tokens to experts and back. Each of T tokens has k slots, each slot an expert; the rows of the experts are the T k
// slots, sorted by expert, in the order of the slots within one. Everything is decided on the device, can be captured
// in a graph, and is bitwise the same from run to run: a row has one writer, and a sum one order.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/activation_kind.h"
#include "fusible/groups.h"

namespace fusible {

// Finds the row of each slot. Ids below 0 or from `groups` on are of no expert: their rows come last.
struct Route {
  const void* ids;  // [slots], int32 or int64
  bool int64_ids;
  int64_t slots;  // T k
  int groups;
  RowScale weights;            // [slots], of no concern here but for `scales`
  int32_t* tokens_per_expert;  // [groups + 1]: the rows of each expert; last, the total
  int32_t* slot_of_row;        // [slots]: the slot of each row; null if not wanted
  int32_t* row_of_slot;        // [slots]: the row of each slot
  float* scales;               // [slots]: the weight of each row; null if not wanted
  int32_t* workspace;          // route_workspace_bytes(slots, groups)
};

// The rows of the tokens and of the experts, `pitch` elements apart.
struct RoutedRows {
  DType type;
  int64_t tokens, columns;
  int top_k;                   // slots of one token
  const int32_t* row_of_slot;  // [tokens, top_k]
  const int32_t* num_rows;     // how many rows the experts have; the others are of no expert
  const void* source;
  int64_t source_pitch;
  void* out;
  int64_t out_pitch;
};

int64_t route_workspace_bytes(int64_t slots, int groups);

// All throw fusible::Error if a launch fails.
void route(const Route& call, int device, cudaStream_t stream);
// Copies each token's row, `source`, to its rows of the experts. Rows of no expert become zero with `fill`, else they
// are unchanged.
void permute(const RoutedRows& call, bool fill, int device, cudaStream_t stream);
// Each token's row is the sum of its rows of the experts, `source`, in fp32, in the order of the slots, rounded once.
void unpermute(const RoutedRows& call, int device, cudaStream_t stream);
// out[slot] = values[row_of_slot[slot]], rounded to the type of `out`; 0 for the slots of no expert.
void gather_slots(const float* values, const int32_t* row_of_slot, const int32_t* num_rows, int64_t slots, void* out,
                  DType type, int device, cudaStream_t stream);

}  // namespace fusible
