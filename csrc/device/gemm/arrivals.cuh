// SPDX-License-Identifier: Apache-2.0
// How one kernel signals to another on the same device that rows have arrived, and how the other waits for them. The
// signalling kernel must be resident first, and must not wait for the other: it lets the next kernel begin, which is
// launched after it on the stream.
#pragma once
#include "device/ptx/signal.cuh"
#include "fusible/arrivals.h"

namespace fusible {

// One more piece of a block is there. By one thread that has met those that wrote it.
DEVICE void tell_arrived(const Arrivals& arrivals, int64_t block) { add_release(arrivals.blocks + block, 1); }

// Whether all pieces of a block are there, for this thread to read.
DEVICE bool has_arrived(const Arrivals& arrivals, int64_t block) {
  return load_acquire(arrivals.blocks + block) >= static_cast<uint32_t>(arrivals.pieces);
}

// Waits until the block has arrived. Reading it by TMA needs ptx::async_proxy_fence_global as well.
DEVICE void wait_for_block(const Arrivals& arrivals, int64_t block) {
  while (!has_arrived(arrivals, block)) pause();
}

}  // namespace fusible
