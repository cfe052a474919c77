// SPDX-License-Identifier: Apache-2.0
// Parameters of the kernels that quantise an activation, or its backward, as they compute it. Kernels that NVRTC
// compiles read them too, so this includes nothing of CUDA.
#pragma once
#include "fusible/activation_kind.h"
#include "fusible/groups.h"
#include "fusible/quantized_copies.h"

namespace fusible {

// activation(preact) * scales, rounded to the type of `preact`.
struct QuantizeActivation {
  Activation activation;  // vectors of 8 lie within one block
  DType type;             // bf16 or fp16
  int64_t tokens, features;
  const void* preact;  // [tokens, features], or [tokens, 2 * features] if gated
  RowScale scales;
  SplitSizes sizes;
  bool power_of_two;
  QuantizedRows rows;
  BlockedColumns columns;
  int tiles;  // as in QuantizeRows
};

// The gradient of `preact`, and activation(preact) * scales again, both rounded to its type. Where the activation is
// gated, its blocks are multiples of 128: no block of scales has gates and ups.
struct QuantizeActivationBackward {
  Activation activation;
  DType type;
  int64_t tokens, features;  // of dpostact
  const void *dpostact, *preact;
  RowScale scales;
  SplitSizes sizes;
  bool power_of_two;
  QuantizedRows rows;  // of the gradient of preact
  BlockedColumns columns, postact_columns;
  void* dscales;     // [tokens] in the type of the scales, zero for rows past the last group; null if not wanted
  float* workspace;  // quantize_backward_workspace() bytes, for dscales
  int tiles;
};

// The additional fields of the kernels of a user's function, in either direction.
template <class Call>
struct QuantizeFunction : Call {
  const void* vectors[kColumnInputs];  // as of ColumnVectors
  float* dvector_partials;             // [inputs, tokens / 64 + groups, features]: as of ActivationParams
  int chunks;                          // blocks of threads that share the same tokens
};

}  // namespace fusible
