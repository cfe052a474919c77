// SPDX-License-Identifier: Apache-2.0
// Quantisation and back in one pass: the values, in bf16, of the copies that a tensor has under MXFP8 and NVFP4
// (ops/formats/mxfp8.py and nvfp4.py), where products are computed in 16 bits and no bytes are kept. Under NVFP4
// they lack the factor of each group, which follows from its amax.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "fusible/dtype.h"
#include "fusible/groups.h"

namespace fusible {

// MXFP8: e4m3 with a power of two for each 32 values. NVFP4: e2m1 with a scale of e4m3 for each 16 values, 16 x 16 of a
// weight.
enum class ScaledFormat : int { kMXFP8 = 0, kNVFP4 = 1 };
constexpr int kMXBlock = 32, kNVBlock = 16;

// Rows of tokens, sorted by group; those past the last group are neither read nor written.
struct FakeQuantizeRows {
  ScaledFormat format;
  DType type;  // bf16 or fp16
  int64_t tokens, features;
  const void* x;  // [tokens, features], or with `slot_of_row` [tokens / top_k, features]
  int64_t pitch;
  SplitSizes sizes;
  const int32_t* slot_of_row;  // as in QuantizeRows
  int top_k;
  void* rows;     // [tokens, features], blocks along the features; null if not wanted
  void* columns;  // blocks of a group's tokens; null if not wanted. [tokens, features], or under NVFP4
                  // [16 * nv_blocks(tokens, groups), features]: the last block of each group is filled up
  // For NVFP4:
  bool is_transformed;            // columns are multiplied by the Hadamard matrix first
  float *row_amax, *column_amax;  // [groups], results; null if the operand is not wanted
  const int64_t* seed;            // of random numbers that values are rounded by; null: to the nearest
};

// The matrices of all groups, as in QuantizeWeight. All copies have the layout of the weight.
struct FakeQuantizeWeight {
  ScaledFormat format;
  DType type;
  int64_t groups, n, k;
  const void* weight;
  int64_t pitch, group_stride;
  std::span<const uintptr_t> addresses;
  void* rows;     // [groups, n, k], blocks along k; under NVFP4 along both. Null if not wanted
  void* columns;  // [groups, n, k], blocks along n; null if not wanted, or under NVFP4
  float* amax;    // [groups], a result under NVFP4
};

constexpr int64_t nv_blocks(int64_t tokens, int64_t groups) { return tokens / kNVBlock + groups; }

// Both throw fusible::Error if the launch fails.
void fake_quantize_rows(const FakeQuantizeRows& call, int device, cudaStream_t stream);
void fake_quantize_weight(const FakeQuantizeWeight& call, int device, cudaStream_t stream);

}  // namespace fusible
