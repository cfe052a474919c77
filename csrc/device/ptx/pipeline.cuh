// SPDX-License-Identifier: Apache-2.0
// Where a role is in a ring of slots that are filled and emptied.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible {

// Position in a ring of `kStages` slots. A slot's `full` barrier is waited for with `phase`, its `empty` barrier with
// `phase ^ 1`.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  DEVICE void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

}  // namespace fusible
