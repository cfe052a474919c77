// SPDX-License-Identifier: Apache-2.0
// The grid of kernels whose blocks take 128 tokens and some tiles of 128 features.
#pragma once
#include <algorithm>

#include "fusible/device.h"
#include "fusible/gemm_config.h"
#include "fusible/quantize.h"

namespace fusible {

struct TokenTiles {
  int of_block;     // tiles that a block takes
  int chunks;       // blocks that share the same tokens
  unsigned blocks;  // all of them
};

// As many tiles for a block as leave the device several waves of blocks.
inline TokenTiles token_tiles(int64_t tokens, int groups, int64_t features, int blocks_per_multiprocessor, int device) {
  const int64_t blocks = token_blocks(tokens, groups), tiles = blocks_of(features, kScaleBlock),
                waves = 4 * int64_t{blocks_per_multiprocessor} * device_properties(device).multiprocessors,
                most = std::clamp<int64_t>(blocks * tiles / waves, 1, 8);
  const int64_t chunks = blocks_of(tiles, most);
  return {static_cast<int>(blocks_of(tiles, chunks)), static_cast<int>(chunks), static_cast<unsigned>(blocks * chunks)};
}

}  // namespace fusible
