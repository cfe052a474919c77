// SPDX-License-Identifier: Apache-2.0
// Activations of whole tensors, gated or not, times a scale for each row: see ops/values/activation_spec.py; one pass
// over memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/activation_kind.h"

namespace fusible {

struct ActivationForward {
  Activation activation;
  DType type;             // of preact and postact, both contiguous
  int64_t rows, columns;  // of postact
  const void* preact;     // [rows, columns], or [rows, 2 * columns] if gated
  RowScale scales;
  void* postact;
};

// With a = activation(preact): dpreact, dscales[t] = sum of dpostact * a over the row, postact = a * scales; null for
// unwanted results.
struct ActivationBackward {
  Activation activation;
  DType type;
  int64_t rows, columns;
  const void *dpostact, *preact;
  RowScale scales;
  void *dpreact, *dscales, *postact;  // dscales in the type of the scales
};

// Both throw fusible::Error if the launch fails.
void activate(const ActivationForward& call, int device, cudaStream_t stream);
void activate_backward(const ActivationBackward& call, int device, cudaStream_t stream);

}  // namespace fusible
