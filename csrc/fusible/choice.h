// SPDX-License-Identifier: Apache-2.0
// The experts of tokens, chosen by logits, and the gradient of the logits. Everything is decided on the device, can be
// captured in a graph, and is bitwise the same from run to run; a token's results do not depend on the others.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/dtype.h"

namespace fusible {

enum class Scores : int { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

inline constexpr int kMaxChoices = 32, kMaxLimitedGroups = 32, kMaxChoiceExperts = 4096;

// The sizes and the rule of a choice, for both passes.
struct ChoiceRule {
  const void* logits;  // [tokens, experts], dense
  DType type;          // of the logits, and of their gradient
  int64_t tokens;
  int experts, top_k;
  Scores scores;
  bool normalize;  // the weights of a token add up to `scale`
  float scale;
};

// Experts are ordered by scores plus bias, or by logits without bias and groups, in fp32. Higher first, NaN before all,
// the lower expert first among equals. Addresses are null for absent operands and unwanted results.
struct Choice {
  ChoiceRule rule;
  int groups, keep, best;  // a token chooses from the `keep` groups with the highest sums of their `best` keys; 1: none
  const float* bias;       // [experts]
  const uint8_t* valid;    // [tokens]: a token with 0 goes to no expert
  const int64_t* given;    // [tokens, top_k]: the experts, unless all are -1
  int64_t* ids;            // [tokens, top_k], the best one first; -1 for a token that is not valid
  float* weights;          // [tokens, top_k]; 0 without an expert
  int64_t* counts;         // [experts]: the slots of each
  // All or none: sums over valid tokens whose highest logit is finite
  int64_t* slots;  // [experts + 1]: their slots by expert; last, their number
  float* sums;     // [experts], of the probabilities
  float* squares;  // [1], of the squared logsumexp of the logits
  int32_t* workspace;
};

struct ChoiceBackward {
  ChoiceRule rule;
  const int64_t* ids;
  const float* d_weights;  // [tokens, top_k]
  const float* d_sums;     // [experts]
  const float* d_squares;  // [1]
  void* d_logits;          // [tokens, experts]
};

int64_t choice_workspace(int64_t tokens, int experts, bool tallied);

// Throw fusible::Error if a launch fails.
void choose(const Choice& call, int device, cudaStream_t stream);
void choose_backward(const ChoiceBackward& call, int device, cudaStream_t stream);

}  // namespace fusible
