// SPDX-License-Identifier: Apache-2.0
// How a kernel tells another one on the same device that rows are there, and how that one waits for them. The one that
// tells must be resident first, and wait for nothing that the other does: it lets the next kernel begin, and that one
// is launched behind it on the stream.
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
