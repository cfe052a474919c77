// SPDX-License-Identifier: Apache-2.0
// The gradient of a token's logits by a team of warps, from the logits and the ids: weights and sums are computed
// again. A row of zeros in shared memory gets the numbers of the chosen experts; dense terms are added if there are
// any. A block reads the gradients of sums once, into such a row.
#include <cuda_runtime.h>

#include "device/rows/logits.cuh"
#include "fusible/device.h"
#include "kernels/rows/choose_launch.h"

namespace fusible {
namespace {

// Numbers of a token that its whole row reads.
struct DenseTerms {
  ScoreOf score;
  float top = 0.f, share = 1.f;  // the highest logarithm of a score, and what makes scores by it probabilities
  float lse = 0.f, pull = 0.f;   // the logsumexp of the logits; the mean of d_sums by the probabilities
  float of_weights = 0.f;        // the gradient that unnormalised softmax weights share
  float of_squares = 0.f;        // twice the gradient of the squared logsumexp
  bool sums = false, squares = false;
};

// The share of a score in all scores; of softmax, `x` is it already.
template <Scores kScores>
DEVICE float probability(float x, const DenseTerms& d) {
  if (kScores == Scores::kSoftmax) return x;
  return x == -kInfinity ? 0.f : expf(log_score<kScores>(x) - d.top) * d.share;
}

// Softmax's logits become its probabilities: every term of its gradient is a multiple of them.
template <Scores kScores, int kCount, int kParts>
DEVICE DenseTerms dense_terms(float (&x)[kCount], float* d_sums, const ChoiceBackward& c, const Team<kParts>& team) {
  DenseTerms d;
  const float highest = highest_of(x, team);
  const bool regular = is_finite(highest);
  d.sums = c.d_sums && regular, d.squares = c.d_squares && regular;
  d.top = log_score<kScores>(highest);
  if (d.squares) d.of_squares = 2.f * *c.d_squares;
  if (kScores != Scores::kSoftmax && d.squares) d.lse = highest + logf(total_of<Scores::kSoftmax>(x, highest, team));
  float total = 0.f;
  if constexpr (kScores == Scores::kSoftmax) {
    total = scores_of<kScores>(x, x, highest, team);
    d.score = ScoreOf::softmax(highest, total);
    d.lse = highest + logf(total);
  } else {
    total = total_of<kScores>(x, highest, team);
  }
  d.share = 1.f / total;
  if constexpr (kScores == Scores::kSoftmax) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = x[i] == 0.f ? 0.f : x[i] * d.share;  // also where all are 0
  }
  if (!d.sums) return d;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const int expert = expert_of<kCount>(i, team);
    if (expert >= c.rule.experts) continue;
    const Vector<float, 4> four = four_of(d_sums, expert);
#pragma unroll
    for (int j = 0; j < 4; ++j) d.pull += probability<kScores>(x[i + j], d) * four.values[j];
  }
  d.pull = team.sum(d.pull);
  return d;
}

template <Scores kScores>
DEVICE float dense_gradient(float x, float d_sum, const DenseTerms& d) {
  const float p = probability<kScores>(x, d);
  if (p == 0.f) return 0.f;  // places behind the last expert, too
  if (kScores == Scores::kSoftmax) {
    float of_probability = -d.of_weights;
    if (d.sums) of_probability += d_sum - d.pull;
    if (d.squares) of_probability += d.of_squares * d.lse;
    return of_probability == 0.f ? 0.f : p * of_probability;  // even if probabilities are NaN
  }
  if (x == -kInfinity) return 0.f;
  float gradient = 0.f;
  if (d.sums) gradient += p * (d_sum - d.pull) * slope<kScores>(x);
  if (d.squares) gradient += d.of_squares * d.lse * expf(x - d.lse);
  return gradient;
}

// Puts the gradients of the chosen logits into the row, of each expert once. Returns the sum of the gradients of the
// logarithms of the weights.
template <Scores kScores, int kParts>
DEVICE float scatter_chosen(float* row, const ChoiceBackward& c, int64_t token, int id, const ScoreOf& score,
                            const Team<kParts>& team) {
  const ChoiceRule& r = c.rule;
  const Team<1> warp{team.lane, 0, nullptr};
  const bool exists = id >= 0;
  const float given = exists && c.d_weights ? c.d_weights[token * r.top_k + team.lane] : 0.f;
  const float at = exists ? read_number(r.logits, r.type, token * r.experts + id) : -kInfinity;
  if (!__ballot_sync(~0u, given != 0.f)) return 0.f;  // without gradients of weights, even of NaN
  const bool never = at == -kInfinity;
  const float weight = weight_of(never ? -kInfinity : log_score<kScores>(at), score, r.normalize);
  const float product = never ? 0.f : r.scale * given * weight, of_all = warp.sum(product);
  const float d_log = r.normalize ? product - weight * of_all : product;
  const float d = never ? 0.f : d_log * slope<kScores>(at);
  const unsigned peers = __match_any_sync(~0u, exists ? id : -1 - team.lane);  // an expert may be given twice
  float together = 0.f;
  for (int j = 0; j < r.top_k; ++j) {
    const float theirs = __shfl_sync(~0u, d, j);
    if (peers >> j & 1) together += theirs;
  }
  if (exists && team.part == 0 && team.lane == __ffs(peers) - 1) row[id] = together;
  return of_all;
}

template <Scores kScores, int kCount, int kParts>
__global__ void __launch_bounds__(kThreadsOfBlock<kParts>, kCount > 16 ? 3 : 4)
    choose_experts_backward(const __grid_constant__ ChoiceBackward c, int64_t stretch, bool vectors) {
  extern __shared__ __align__(16) float shared[];
  constexpr int kTeams = kTeamsOfBlock<kParts>;
  const ChoiceRule& r = c.rule;
  const int warp = threadIdx.x / 32, own = warp / kParts;
  const Team<kParts> team{static_cast<int>(threadIdx.x % 32), warp % kParts, reinterpret_cast<uint64_t*>(shared)};
  const int stride = shared_row(r.experts);
  float *d_sums = shared + 8, *row = d_sums + (own + 1) * stride;
  const int64_t begin = blockIdx.x * stretch, end = min(r.tokens, begin + stretch);
  const bool spreads = kScores == Scores::kSoftmax && !r.normalize, reads = c.d_sums || c.d_squares || spreads;
  if (c.d_sums) {
    for (int e = threadIdx.x; e < stride; e += kThreadsOfBlock<kParts>) d_sums[e] = e < r.experts ? c.d_sums[e] : 0.f;
    __syncthreads();
  }
  for (int64_t token = begin + own; token < end; token += kTeams) {
    const int64_t id = team.lane < r.top_k ? c.ids[token * r.top_k + team.lane] : -1;
    float x[kCount];
    if (reads) load_logits(x, r, token, vectors, team);  // before the ids have come
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      if (expert_of<kCount>(i, team) < r.experts) four_of(row, expert_of<kCount>(i, team)) = {};
    const bool valid = __ballot_sync(~0u, id != -1), dense = valid && reads;
    DenseTerms terms;
    if (dense) terms = dense_terms<kScores>(x, d_sums, c, team);
    team.meet();
    if (valid) {
      const int expert = id >= 0 && id < r.experts ? static_cast<int>(id) : -1;
      const float of_weights = scatter_chosen<kScores>(row, c, token, expert, terms.score, team);
      if (spreads) terms.of_weights = of_weights;
    }
    team.meet();
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int expert = expert_of<kCount>(i, team);
      if (expert >= r.experts) continue;
      float four[4];
      convert(four, four_of(row, expert));
      if (dense) {
        const Vector<float, 4> of_sums = four_of(d_sums, expert);
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] += dense_gradient<kScores>(x[i + j], of_sums.values[j], terms);
      }
      store_four(c.d_logits, r.type, token * r.experts + expert, four, r.experts - expert, vectors);
    }
    team.meet();
  }
}

}  // namespace

void choose_backward(const ChoiceBackward& c, int device, cudaStream_t stream) {
  const ChoiceRule& r = c.rule;
  check_rule(r);
  if (!r.tokens) return;
  const DeviceGuard guard(device);
  const TokenStretches stretches = token_stretches(r.tokens, r.experts, kMostGradientBlocks);
  const bool vectors = vectors_fit(4, {r.experts}, {r.logits, c.d_logits});
  dispatch_choice(r, [&](auto scores, auto count, auto parts) {
    const auto kernel =
        choose_experts_backward<decltype(scores)::value, decltype(count)::value, decltype(parts)::value>;
    const size_t bytes = sizeof(float) * (8 + (kTeamsOfBlock<decltype(parts)::value> + 1) * shared_row(r.experts));
    FUSIBLE_CUDA_CHECK(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "gradient of a choice of experts with ", bytes, " bytes of shared memory");
    kernel<<<stretches.blocks, kThreadsOfBlock<decltype(parts)::value>, bytes, stream>>>(c, stretches.tokens, vectors);
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "gradient of ", r.tokens, " choices of ", r.experts, " experts");
}

}  // namespace fusible
