// SPDX-License-Identifier: Apache-2.0
// Scores of experts by their logits, in logarithms, which neither saturate nor underflow; and numbers as keys that
// compare as whole numbers.
#pragma once
#include "device/ptx/ptx.cuh"
#include "fusible/choice.h"

namespace fusible {

inline constexpr float kInfinity = __builtin_huge_valf();

// Higher for a higher number, highest for NaN. 0 is of no number, not even of -infinity.
DEVICE uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);  // of -0 those of 0
  return x != x ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float number_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

DEVICE bool is_finite(float x) { return fabsf(x) < kInfinity; }

DEVICE float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }
DEVICE float log_sigmoid(float x) { return -softplus(-x); }
DEVICE float log_softplus(float x) { return x < -15.f ? x : logf(softplus(x)); }

// The logarithm of a score; softmax without the constant of a row.
template <Scores kScores>
DEVICE float log_score(float x) {
  if constexpr (kScores == Scores::kSoftmax) return x;
  else if constexpr (kScores == Scores::kSigmoid) return log_sigmoid(x);
  else return 0.5f * log_softplus(x);
}
// Its derivative.
template <Scores kScores>
DEVICE float slope(float x) {
  if constexpr (kScores == Scores::kSoftmax) return 1.f;
  else if constexpr (kScores == Scores::kSigmoid) return expf(log_sigmoid(-x));
  else return 0.5f * expf(log_sigmoid(x) - log_softplus(x));
}

}  // namespace fusible
