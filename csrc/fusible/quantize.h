// SPDX-License-Identifier: Apache-2.0
// Quantisation to e4m3 with a scale for each block, in one pass over memory: rows of tokens and their transposed
// copies, weights, and activations. The layouts of copies are those of ops/formats/copies.py. Scales decode: value =
// byte * scale. Group sizes are read on the device. Rows past the last group are neither read nor written.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "fusible/quantize_activation.h"

namespace fusible {

// The extent of one scale: a block of values, see the operands; a whole row of an operand (for a group's tokens, a
// feature); or a group, with all its tokens or its matrix. Whole rows and groups are read twice: for their largest
// magnitudes, and for the cast.
enum class Scaling : int { kBlocks = 0, kRows = 1, kGroups = 2 };

struct QuantizeRows {
  DType type;  // bf16 or fp16
  int64_t tokens, features;
  const void* x;  // [tokens, features], or with `slot_of_row` [tokens / top_k, features]
  int64_t pitch;
  // [tokens, blocks of 128 features] at the pitch of x, as e8m0: x is e4m3, values are bytes times these, and columns
  // alone are wanted; null: x is of `type`.
  const uint8_t* exponents;
  SplitSizes sizes;
  bool power_of_two;
  QuantizedRows rows;
  BlockedColumns columns;
  const int32_t* slot_of_row;  // [tokens]: row r belongs to token slot_of_row[r] / top_k; null: row r is x[r]
  int top_k;
  int tiles;  // of 128 features that a block takes, one after the other; the launch decides
  Scaling scaling;
  float* amax;          // largest_magnitudes() numbers, unless scales are per block: of groups, or of rows and columns
  const float* encode;  // [groups], factors of the groups' values; null: computed from their amax
};

// The matrices of all groups, at equal distances or where `addresses` say.
struct QuantizeWeight {
  DType type;
  int64_t groups, n, k;
  const void* weight;                    // [groups, n, k]
  int64_t pitch, group_stride;           // in elements
  std::span<const uintptr_t> addresses;  // of each matrix, if there are any
  int64_t halves;                        // blocks restart at each
  bool power_of_two;
  uint8_t *data, *transposed;  // [groups, n, k] and [groups, k, n]; null if not wanted
  float* scales;               // [groups, halves * blocks of n / halves, blocks of k], or [groups, n] of rows or groups
  bool scales_transposed;      // [groups, blocks of k, blocks of n]
  Scaling scaling;
  float* transposed_scales;  // [groups, k], unless blocks have the scales
  float* amax;               // as in QuantizeRows, with n for the tokens of each group
  const float* encode;       // as in QuantizeRows
};

// out[g, c, r] = source[g, r, c], whatever the sizes: a copy of weights for the gradient of rows.
struct TransposeBytes {
  int64_t groups, rows, columns;
  const uint8_t* source;
  uint8_t* out;
};

// All throw fusible::Error if the launch fails.
void quantize_rows(const QuantizeRows& call, int device, cudaStream_t stream);
void quantize_weight(const QuantizeWeight& call, int device, cudaStream_t stream);
void transpose_bytes(const TransposeBytes& call, int device, cudaStream_t stream);
// For a user's function, `vectors` are the numbers of columns that it reads, and `dvectors` the destination of the
// gradient of each; empty if they are not wanted.
void quantize_activation(const QuantizeActivation& call, const ColumnVectors& vectors, int device, cudaStream_t stream);
void quantize_activation_backward(const QuantizeActivationBackward& call, const ColumnVectors& vectors,
                                  std::span<const DVector> dvectors, int device, cudaStream_t stream);

// Numbers of `amax`, for `rows` of all groups.
constexpr int64_t largest_magnitudes(Scaling scaling, int64_t rows, int64_t groups, int64_t features) {
  return scaling == Scaling::kGroups ? groups : rows + groups * features;
}

// A share of dscales for each block of 128 features; and behind them, for so many dvectors, their sums by column over
// blocks of 64 rows.
constexpr int64_t dscale_shares_bytes(int64_t tokens, int64_t features) {
  return (features + kScaleBlock - 1) / kScaleBlock * tokens * static_cast<int64_t>(sizeof(float));
}
int64_t quantize_backward_workspace(int64_t tokens, int64_t features, int64_t groups, int64_t dvectors);

}  // namespace fusible
