// SPDX-License-Identifier: Apache-2.0
// A token's logits in the registers of its team, and what all experts make together.
#pragma once
#include "device/ptx/approx.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/vector.cuh"
#include "device/rows/team.cuh"

namespace fusible {

template <int kCount, int kParts, class T>
DEVICE void load_logits(float (&x)[kCount], const T* row, int experts, bool vectors, const Team<kParts>& team) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const int expert = expert_of<kCount>(i, team);
    float four[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
    if (vectors) {
      if (expert < experts) load<T, 4>(four, row + expert);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (expert + j < experts) four[j] = static_cast<float>(row[expert + j]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i + j] = four[j];
  }
}

// -infinity where there is no expert.
template <int kCount, int kParts>
DEVICE void load_logits(float (&x)[kCount], const ChoiceRule& c, int64_t token, bool vectors,
                        const Team<kParts>& team) {
  const int64_t first = token * c.experts;
  switch (c.type) {
    case DType::kFloat32: return load_logits(x, static_cast<const float*>(c.logits) + first, c.experts, vectors, team);
    case DType::kFloat16: return load_logits(x, static_cast<const __half*>(c.logits) + first, c.experts, vectors, team);
    default: load_logits(x, static_cast<const __nv_bfloat16*>(c.logits) + first, c.experts, vectors, team);
  }
}

// The floats of a row of numbers in shared memory, which are moved in fours; and four of them.
__host__ __device__ inline int shared_row(int experts) { return (experts + 3) / 4 * 4; }
DEVICE Vector<float, 4>& four_of(float* row, int expert) { return reinterpret_cast<Vector<float, 4>&>(row[expert]); }

// The first `count` of four numbers, or all at once where rows are moved in vectors.
template <class T>
DEVICE void store_four(T* to, const float (&from)[4], int count, bool vectors) {
  Vector<T, 4> rounded;
#pragma unroll
  for (int j = 0; j < 4; ++j) rounded.values[j] = static_cast<T>(from[j]);
  if (vectors && count >= 4) {
    *reinterpret_cast<Vector<T, 4>*>(to) = rounded;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < count) to[j] = rounded.values[j];
  }
}
DEVICE void store_four(void* to, DType type, int64_t i, const float (&from)[4], int count, bool vectors) {
  switch (type) {
    case DType::kFloat32: return store_four(static_cast<float*>(to) + i, from, count, vectors);
    case DType::kFloat16: return store_four(static_cast<__half*>(to) + i, from, count, vectors);
    default: store_four(static_cast<__nv_bfloat16*>(to) + i, from, count, vectors);
  }
}

// The highest logit of a token; NaN if one is.
template <int kCount, int kParts>
DEVICE float highest_of(const float (&x)[kCount], const Team<kParts>& team) {
  float most = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) most = ptx::max_nan(most, x[i]);
  return number_of(team.highest(key_of(most)));
}

// The scores, divided by the highest score; `scores` may be `x`. Returns their sum.
template <Scores kScores, int kCount, int kParts>
DEVICE float scores_of(float (&scores)[kCount], const float (&x)[kCount], float highest, const Team<kParts>& team) {
  const float top = log_score<kScores>(highest);
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) total += scores[i] = x[i] == -kInfinity ? 0.f : expf(log_score<kScores>(x[i]) - top);
  return team.sum(total);
}
// A score is exp(its logarithm - top) * share: of softmax, whose difference to the highest logit is exact however large
// logits are. Beside infinity, for which the sum of scores is NaN, other scores are 0.
struct ScoreOf {
  float top = 0.f, share = 1.f;
  static DEVICE ScoreOf softmax(float highest, float total) {
    return {highest, highest == kInfinity ? 1.f : 1.f / total};
  }
  DEVICE float operator()(float log_score) const { return expf(log_score - top) * share; }
};
template <Scores kScores, int kCount, int kParts>
DEVICE float total_of(const float (&x)[kCount], float highest, const Team<kParts>& team) {
  float scores[kCount];
  return scores_of<kScores>(scores, x, highest, team);
}

// The weight of the slot of this lane, without the scale, from the logarithm of its score; lanes without an expert have
// -infinity. Slots are in the same lanes of all warps of a team.
DEVICE float weight_of(float log_score, const ScoreOf& score, bool normalize) {
  const bool never = log_score == -kInfinity;
  if (!normalize) return never ? 0.f : score(log_score);
  const float most = number_of(__reduce_max_sync(~0u, key_of(log_score)));
  const Team<1> warp{};
  const float total = warp.sum(never ? 0.f : expf(log_score - most));
  return never ? 0.f : expf(log_score - most) / total;
}

}  // namespace fusible
