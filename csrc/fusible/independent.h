// SPDX-License-Identifier: Apache-2.0
// Products that neither read nor overwrite each other's results or operands, launched directly one after another. The
// next product begins when blocks of the previous one have ended, not when all have: they share its last round.
//
// A product waits for the previous kernel only at its own end. It sees the writes of older kernels, because the first
// product waits for them before it lets the next one begin (docs/kernels.md). The caller declares that products follow
// one another and that nothing else on the stream touches their memory meanwhile. Independence is checked here.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace fusible {

struct GroupedGemm;

struct Range {
  uintptr_t first, end;
};
struct Touched {
  std::vector<Range> read, written;
};

// All device memory that a call reads, and that it writes.
Touched touched_by(const GroupedGemm& call);

// Before each launch.
void count_launch();

// Whether this launch may begin before the earlier one on this stream has ended: that one allows it, and neither it nor
// those beside it touch memory that this one writes, or write memory that this one touches.
bool begins_beside(const Touched& touched, int device, cudaStream_t stream);

// The launch that has just been made lets the next one begin; `beside`: together with those before it.
void let_follow(Touched touched, bool beside, int device, cudaStream_t stream);

}  // namespace fusible
