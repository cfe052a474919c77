// SPDX-License-Identifier: Apache-2.0
// A product whose rows go where they are summed: to the slots of their tokens, in the buffers of the tokens' ranks.
#pragma once
#include "fusible/grouped_gemm.h"
#include "fusible/peers.h"

namespace fusible {

// The destinations of this rank's rows. All ranks have the same number of slots, with a row for each at `at` in its
// buffer.
struct RowSlots {
  Peers peers;
  const LaneState* state;      // if the lane has failed, nothing is stored, since others may be reading
  const int32_t* slot_of_row;  // the slot of each row of all ranks, among the slots of all ranks
  const int32_t* firsts;       // [ranks + 1]: the first row of each rank
  int64_t slots, at;
};

// Behind the parameters of the kernel that stores its rows one after the other.
template <class Params>
struct WithRowSlots : Params {
  RowSlots slots;
};

// `gemm` is kNT, of bf16, and its `out` the address of this rank's slots; rows of no group go nowhere. Throws
// fusible::Error, like grouped_gemm.
void gemm_to_slots(const GroupedGemm& gemm, const RowSlots& slots, int device, cudaStream_t stream);

}  // namespace fusible
