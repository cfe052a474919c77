// SPDX-License-Identifier: Apache-2.0
// Activations of whole tensors, gated or not, times a scale for each row: what ops/activations.py describes, one pass
// over memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/tensor_map.h"

namespace fusible {

enum class Curve { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kReluSquared = 4, kSigmoid = 5 };

// act(gate) * (up + linear_offset), or act(x) where not gated.
struct Activation {
  Curve curve;
  bool gated;
  float alpha;  // the slope inside silu
  float limit;  // gate <= limit, |up| <= limit; infinity for none
  float linear_offset;
  int64_t block;  // columns of gate before as many of up
};

// A number for each row; null for ones.
struct RowScale {
  const void* data;
  DType type;
};

struct ActivationForward {
  Activation activation;
  DType type;             // of preact and postact, both contiguous
  int64_t rows, columns;  // of postact
  const void* preact;     // [rows, columns], or [rows, 2 * columns] if gated
  RowScale scales;
  void* postact;
};

// With a = activation(preact): dpreact, dscales[t] = sum of dpostact * a over the row, postact = a * scales; null for
// what is not wanted.
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
