// SPDX-License-Identifier: Apache-2.0
// A team of warps chooses the experts of a token: k times the highest key, which are two reductions of whole numbers. A
// block has a stretch of tokens, counts in shared memory, and leaves its sums to a second kernel.
#include <cuda_runtime.h>

#include "device/rows/logits.cuh"
#include "fusible/device.h"
#include "kernels/rows/choose_launch.h"

namespace fusible {
namespace {

// The numbers that a block leaves: `counts` and, if sums are wanted, the same of tokens that are in none, their number,
// and sums.
struct BlockSums {
  int experts;
  bool tallied;
  __host__ __device__ int64_t words() const { return tallied ? 3 * int64_t{experts} + 2 : experts; }
  __host__ __device__ int counters() const { return tallied ? 2 * experts + 1 : experts; }
};

// After the exchange: counters; of each team a row of keys, if experts are in groups, and one of sums, if wanted.
struct ChoiceShared {
  static constexpr int kExchange = 8;  // floats of warps, or 64-bit numbers of parts
  int row, teams, counters;
  bool grouped, tallied;
  __host__ __device__ ChoiceShared(const Choice& c, int of_block)
      : row(shared_row(c.rule.experts)),
        teams(of_block),
        counters(BlockSums{c.rule.experts, c.slots != nullptr}.counters()),
        grouped(c.groups > 1),
        tallied(c.slots != nullptr) {}
  __host__ __device__ int keys(int team) const { return kExchange + shared_row(counters) + team * row; }
  __host__ __device__ int sums(int team) const { return keys((grouped ? teams : 0) + team); }
  __host__ __device__ size_t bytes() const { return sizeof(float) * static_cast<size_t>(sums(tallied ? teams : 0)); }
};

// Leaves keys of 0 to the experts outside of the best groups. `row` is of this team, [experts].
template <int kCount, int kParts>
DEVICE void keep_best_groups(uint32_t (&keys)[kCount], float* row, const Choice& c, const Team<kParts>& team) {
  const int size = c.rule.experts / c.groups, lane = team.lane;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int expert = expert_of<kCount>(i, team);
    if (expert < c.rule.experts) row[expert] = number_of(keys[i]);
  }
  team.meet();
  uint32_t of_group = 0;  // of group `lane`
  if (lane < c.groups) {
    float first = -kInfinity, second = -kInfinity;
    bool nan = false;
    for (int e = 0; e < size; ++e) {
      const float x = row[lane * size + e];
      nan |= x != x;
      second = fmaxf(second, fminf(first, x)), first = fmaxf(first, x);
    }
    of_group = nan ? ~0u : key_of(c.best > 1 && size > 1 ? first + second : first);
  }
  uint32_t kept = 0;
  for (int j = 0; j < c.keep; ++j) {
    const uint32_t most = __reduce_max_sync(~0u, of_group);
    const int group = __ffs(__ballot_sync(~0u, of_group == most)) - 1;
    kept |= 1u << group;
    if (lane == group) of_group = 0;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (!(kept >> (expert_of<kCount>(i, team) / size & 31) & 1)) keys[i] = 0;
  team.meet();
}

// The keys of a lane, and the highest of each few neighbours, so that a choice looks again at these few alone.
template <int kCount>
struct LaneKeys {
  static constexpr int kFew = kCount > 16 ? 8 : 4;
  uint32_t (&keys)[kCount];
  uint32_t most[kCount / kFew];
  int at[kCount / kFew];

  DEVICE explicit LaneKeys(uint32_t (&of_lane)[kCount]) : keys(of_lane) {
#pragma unroll
    for (int few = 0; few < kCount / kFew; ++few) look(few);
  }
  DEVICE void look(int few) {
    most[few] = 0, at[few] = few * kFew;
#pragma unroll
    for (int i = few * kFew; i < (few + 1) * kFew; ++i)
      if (keys[i] > most[few]) most[few] = keys[i], at[few] = i;  // the first of equals
  }
  // The next choice, whose place gets key 0.
  template <int kParts>
  DEVICE int take_best(const Team<kParts>& team) {
    uint32_t highest = most[0];
    int place = at[0];
#pragma unroll
    for (int few = 1; few < kCount / kFew; ++few)
      if (most[few] > highest) highest = most[few], place = at[few];
    const uint32_t mine = expert_of<kCount>(place, team);
    uint32_t expert = mine;
    team.best(highest, expert);
    const int chosen = static_cast<int>(expert) % (32 * kCount) / 128 * 4 / kFew;  // the same in all lanes
#pragma unroll
    for (int few = 0; few < kCount / kFew; ++few) {
      if (few != chosen) continue;
#pragma unroll
      for (int i = few * kFew; i < (few + 1) * kFew; ++i)
        if (mine == expert && i == place) keys[i] = 0;
      look(few);
    }
    return static_cast<int>(expert);
  }
};

// The chosen expert of this lane's slot; -1 in lanes without a slot.
template <Scores kScores, int kCount, int kParts>
DEVICE int chosen(const float (&x)[kCount], const Choice& c, const ScoreOf& score, float* row,
                  const Team<kParts>& team) {
  uint32_t keys[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int expert = expert_of<kCount>(i, team);
    float compared = x[i];
    if (c.bias || c.groups > 1) {
      compared = x[i] == -kInfinity ? 0.f : score(log_score<kScores>(x[i]));
      if (c.bias && expert < c.rule.experts) compared += c.bias[expert];
    }
    keys[i] = expert < c.rule.experts ? key_of(compared) : 0;
  }
  if (c.groups > 1) keep_best_groups(keys, row, c, team);
  LaneKeys<kCount> best(keys);
  int id = -1;
  for (int j = 0; j < c.rule.top_k; ++j) {
    const int expert = best.take_best(team);
    if (team.lane == j) id = expert;
  }
  return id;
}

template <Scores kScores, int kCount, int kParts>
__global__ void __launch_bounds__(kThreadsOfBlock<kParts>, 2)
    choose_experts(const __grid_constant__ Choice c, int64_t stretch, bool vectors) {
  extern __shared__ __align__(16) float shared[];
  constexpr int kTeams = kTeamsOfBlock<kParts>;
  const ChoiceRule& r = c.rule;
  const ChoiceShared layout(c, kTeams);
  const BlockSums block{r.experts, c.slots != nullptr};
  const int warp = threadIdx.x / 32, own = warp / kParts;
  const Team<kParts> team{static_cast<int>(threadIdx.x % 32), warp % kParts, reinterpret_cast<uint64_t*>(shared)};
  int* counters = reinterpret_cast<int*>(shared + ChoiceShared::kExchange);
  float *sums = shared + layout.sums(own), squares = 0.f;
  for (int i = threadIdx.x; i < layout.counters; i += kThreadsOfBlock<kParts>) counters[i] = 0;
  if (block.tallied)
    for (int i = threadIdx.x; i < kTeams * layout.row; i += kThreadsOfBlock<kParts>) shared[layout.sums(0) + i] = 0.f;
  __syncthreads();

  const int64_t begin = blockIdx.x * stretch, end = min(r.tokens, begin + stretch);
  for (int64_t token = begin + own; token < end; token += kTeams) {
    const int64_t slot = token * r.top_k + team.lane;
    const bool writes = team.part == 0 && team.lane < r.top_k;
    if (c.valid && !c.valid[token]) {
      if (writes) c.ids[slot] = -1, c.weights[slot] = 0.f;
      continue;
    }
    float x[kCount];
    load_logits(x, r, token, vectors, team);
    const float highest = highest_of(x, team);
    const bool regular = is_finite(highest), tallied = block.tallied && regular, by_scores = c.bias || c.groups > 1;
    ScoreOf score;
    if (tallied || (kScores == Scores::kSoftmax && (by_scores || !r.normalize))) {
      float scores[kCount];
      const float total = scores_of<kScores>(scores, x, highest, team);
      if (kScores == Scores::kSoftmax) score = ScoreOf::softmax(highest, total);
      if (tallied) {
        const float share = 1.f / total;
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
          const int expert = expert_of<kCount>(i, team);
          if (expert >= r.experts) continue;
          Vector<float, 4> four = four_of(sums, expert);
#pragma unroll
          for (int j = 0; j < 4; ++j) four.values[j] += scores[i + j] * share;
          four_of(sums, expert) = four;
        }
        float exponentials = total;
        if (kScores != Scores::kSoftmax) exponentials = total_of<Scores::kSoftmax>(x, highest, team);
        const float lse = highest + logf(exponentials);
        squares += lse * lse;
        if (team.part == 0 && team.lane == 0) atomicAdd(&counters[2 * r.experts], 1);
      }
    }
    int64_t id = c.given && team.lane < r.top_k ? c.given[slot] : -1;
    if (!__ballot_sync(~0u, id != -1)) id = chosen<kScores>(x, c, score, shared + layout.keys(own), team);
    const bool exists = id >= 0 && id < r.experts;
    const float at = exists ? read_number(r.logits, r.type, token * r.experts + id) : -kInfinity;
    const float weight = weight_of(exists ? log_score<kScores>(at) : -kInfinity, score, r.normalize);
    if (writes) {
      c.ids[slot] = id;
      c.weights[slot] = exists ? r.scale * weight : 0.f;
      if (exists) atomicAdd(&counters[id + (block.tallied && !regular ? r.experts : 0)], 1);  // whole: any order
    }
  }

  __syncthreads();
  if (block.tallied && team.part == 0 && team.lane == 0) shared[own] = squares;
  __syncthreads();
  int32_t* out = c.workspace + blockIdx.x * block.words();
  for (int i = threadIdx.x; i < layout.counters; i += kThreadsOfBlock<kParts>) out[i] = counters[i];
  if (!block.tallied) return;
  float* of_block = reinterpret_cast<float*>(out + layout.counters);
  for (int e = threadIdx.x; e <= r.experts; e += kThreadsOfBlock<kParts>) {
    float sum = 0.f;  // team after team, so that the order is one
    for (int t = 0; t < kTeams; ++t) sum += e < r.experts ? shared[layout.sums(t) + e] : shared[t];
    of_block[e] = sum;
  }
}

// 32 numbers per block: a warp adds those of some blocks, then the first warp adds the warps, always in this order.
constexpr int kAdders = 16;
__global__ void __launch_bounds__(32 * kAdders) add_blocks(const __grid_constant__ Choice c, int blocks) {
  __shared__ int64_t counts[kAdders][32], others[kAdders][32];
  __shared__ float sums[kAdders][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = c.rule.experts;
  const BlockSums block{experts, c.slots != nullptr};
  const int expert = blockIdx.x * 32 + lane, last = block.tallied ? experts : experts - 1;
  int64_t count = 0, other = 0;
  float sum = 0.f;
  if (expert <= last) {
#pragma unroll 4
    for (int b = warp; b < blocks; b += kAdders) {
      const int32_t* from = c.workspace + b * block.words();
      count += from[expert == experts ? 2 * experts : expert];
      if (!block.tallied) continue;
      if (expert < experts) other += from[experts + expert];
      sum += __uint_as_float(from[block.counters() + expert]);
    }
  }
  counts[warp][lane] = count, others[warp][lane] = other, sums[warp][lane] = sum;
  __syncthreads();
  if (warp || expert > last) return;
  for (int w = 1; w < kAdders; ++w) count += counts[w][lane], other += others[w][lane], sum += sums[w][lane];
  if (expert < experts) c.counts[expert] = count + other;
  if (!block.tallied) return;
  c.slots[expert] = count;
  if (expert < experts) c.sums[expert] = sum;
  else *c.squares = sum;
}

}  // namespace

int64_t choice_workspace(int64_t tokens, int experts, bool tallied) {
  const BlockSums block{experts, tallied};
  return token_stretches(tokens, experts, kMostChoiceBlocks).blocks * block.words() *
         static_cast<int64_t>(sizeof(int32_t));
}

void choose(const Choice& c, int device, cudaStream_t stream) {
  const ChoiceRule& r = c.rule;
  check_rule(r);
  FUSIBLE_CHECK(c.groups >= 1 && c.groups <= kMaxLimitedGroups && r.experts % c.groups == 0, "1 to ", kMaxLimitedGroups,
                " groups can divide ", r.experts, " experts, got ", c.groups);
  FUSIBLE_CHECK(c.workspace, "a choice of experts needs a workspace, got none");
  const DeviceGuard guard(device);
  const TokenStretches stretches = token_stretches(r.tokens, r.experts, kMostChoiceBlocks);
  const bool vectors = vectors_fit(4, {r.experts}, {r.logits});
  dispatch_choice(r, [&](auto scores, auto count, auto parts) {
    const auto kernel = choose_experts<decltype(scores)::value, decltype(count)::value, decltype(parts)::value>;
    const size_t bytes = ChoiceShared(c, kTeamsOfBlock<decltype(parts)::value>).bytes();
    FUSIBLE_CUDA_CHECK(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "choice of experts with ", bytes, " bytes of shared memory");
    kernel<<<stretches.blocks, kThreadsOfBlock<decltype(parts)::value>, bytes, stream>>>(c, stretches.tokens, vectors);
  });
  const int numbers = r.experts + (c.slots != nullptr);
  add_blocks<<<blocks_of(numbers, 32), 32 * kAdders, 0, stream>>>(c, stretches.blocks);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "choice of ", r.top_k, " of ", r.experts, " experts by ", r.tokens, " tokens");
}

}  // namespace fusible
