// SPDX-License-Identifier: Apache-2.0
// Activations of whole tensors, gated or not, times a scale for each row: what ops/activations.py describes, one pass
// over memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/activation_kind.h"

namespace fusible {

struct ActivationForward {
  Activation activation;
  DType type;             // of pre and hidden, both contiguous
  int64_t rows, columns;  // of hidden
  const void* pre;        // [rows, columns], or [rows, 2 * columns] if gated
  RowScale scales;
  void* hidden;
};

// With a = activation(pre): dpre, dscales[t] = sum of dhidden * a over the row, hidden = a * scales; null for what is
// not wanted.
struct ActivationBackward {
  Activation activation;
  DType type;
  int64_t rows, columns;
  const void *dhidden, *pre;
  RowScale scales;
  void *dpre, *dscales, *hidden;  // dscales in the type of the scales
};

// Both throw fusible::Error if the launch fails.
void activate(const ActivationForward& call, int device, cudaStream_t stream);
void activate_backward(const ActivationBackward& call, int device, cudaStream_t stream);

}  // namespace fusible
