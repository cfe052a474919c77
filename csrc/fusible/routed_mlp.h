// SPDX-License-Identifier: Apache-2.0
// The routed experts of a layer without gradients, as one call: routing, rows to the experts, both linears and the
// activation between them, the weighted sum back. For inference, where a layer of few tokens takes the host longer than
// the device.
#pragma once
#include "fusible/fused_gemm.h"
#include "fusible/routing.h"

namespace fusible {

// The state kept from call to call. Weights are [E, out, in], or [E, in, out] if transposed; biases [E, out] may have
// no data.
struct RoutedMlp {
  DType type;  // of rows and weights
  int groups;
  int64_t features;  // of a token
  int64_t columns;   // of the hidden rows
  Activation activation;
  bool transposed;
  bool unfused;  // the activation is a kernel of its own
  MatrixView up, down, up_bias, down_bias;
};

struct RoutedTokens {
  int64_t tokens;
  int top_k;      // slots of one token
  const void* x;  // [tokens, features], `pitch` elements apart
  int64_t pitch;
  const void* ids;  // [tokens, top_k], int32 or int64
  bool int64_ids;
  RowScale weights;  // [tokens, top_k]
  void* out;         // [tokens, features], dense
  void* workspace;   // routed_workspace_bytes(...), aligned to 256 bytes
};

int64_t routed_workspace_bytes(const RoutedMlp& mlp, int64_t slots);

// out[t] = the sum over t's slots of weight * (W2 activation(W1 x[t] + b1) + b2) of the slot's expert; see route() for
// ids of none. Throws fusible::Error. Can be captured in a graph.
void routed_mlp(const RoutedMlp& mlp, const RoutedTokens& call, int device, cudaStream_t stream);

}  // namespace fusible
