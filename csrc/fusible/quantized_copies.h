// SPDX-License-Identifier: Apache-2.0
// Where the e4m3 copies of a matrix lie. It includes nothing of CUDA: kernels that NVRTC compiles read it too.
#pragma once
#include <cstdint>

#include "fusible/scale_block.h"

namespace fusible {

// Scales of neighbouring tokens are neighbours; scales of consecutive blocks of features are this far apart.
constexpr int64_t row_scales_pitch(int64_t tokens) { return (tokens + 3) / 4 * 4; }
// Blocks of 128 tokens that groups can have.
constexpr int64_t token_blocks(int64_t tokens, int64_t groups) { return tokens / kScaleBlock + groups; }

// Bytes [tokens, features] and scales [blocks of features, row_scales_pitch(tokens)]; null if not wanted.
struct QuantizedRows {
  uint8_t* data;
  float* scales;
  int64_t scales_pitch;  // derived
};
// Bytes [token_blocks, features, 128] and scales [token_blocks, features]; null if not wanted.
struct BlockedColumns {
  uint8_t* data;
  float* scales;
};

}  // namespace fusible
