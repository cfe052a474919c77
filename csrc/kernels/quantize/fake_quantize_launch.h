// SPDX-License-Identifier: Apache-2.0
// The grid of kernels whose warps take the same rows and neighbouring features.
#pragma once
#include "fusible/fake_quantize.h"
#include "fusible/gemm_config.h"

namespace fusible {

constexpr int kFakeThreads = 128, kFakeWarps = kFakeThreads / 32;

struct FeatureUnits {
  int of_block;  // units of features that a block takes, its warps one after the other
  int chunks;    // blocks that share the same rows

  // As many as make finding the rows cheap.
  FeatureUnits(int64_t features, int unit) {
    const int64_t units = blocks_of(features, unit);
    chunks = static_cast<int>(blocks_of(units, 4 * kFakeWarps)), of_block = static_cast<int>(blocks_of(units, chunks));
  }
};

// One for each format.
void fake_quantize_mx_rows(const FakeQuantizeRows& call, cudaStream_t stream);
void fake_quantize_mx_weight(const FakeQuantizeWeight& call, cudaStream_t stream);
void fake_quantize_nv_rows(const FakeQuantizeRows& call, cudaStream_t stream);
void fake_quantize_nv_weight(const FakeQuantizeWeight& call, cudaStream_t stream);

}  // namespace fusible
