// SPDX-License-Identifier: Apache-2.0
// A team of warps chooses the experts of a token: k times the highest key, which are two reductions of whole numbers. A
// block has a stretch of tokens, counts in shared memory, and leaves its sums to a second kernel.
#include <cuda_runtime.h>

#include "device/rows/logits.cuh"
#include "fusible/device.h"
#include "fusible/overlapping_launch.h"
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

struct ChoiceShared {
  static constexpr int kExchange = 8;  // floats of warps, or 64-bit numbers of parts
  int counters, row, rows;
  __host__ __device__ ChoiceShared(const Choice& c, int teams)
      : counters(BlockSums{c.rule.experts, c.slots != nullptr}.counters()),
        row(c.rule.experts),
        rows(c.groups > 1 ? teams
             : c.slots    ? 1
                          : 0) {}
  __host__ __device__ size_t bytes() const {
    return sizeof(float) * (kExchange + static_cast<size_t>(counters) + static_cast<size_t>(rows) * row);
  }
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

// The next choice, whose place gets key 0.
template <int kCount, int kParts>
DEVICE int take_best(uint32_t (&keys)[kCount], const Team<kParts>& team) {
  uint32_t most = 0;
  int at = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (keys[i] > most) most = keys[i], at = i;  // the first of equals
  const uint32_t mine = expert_of<kCount>(at, team);
  uint32_t expert = mine;
  team.best(most, expert);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (mine == expert && i == at) keys[i] = 0;
  return static_cast<int>(expert);
}

// The chosen expert of this lane's slot; -1 in lanes without a slot.
template <Scores kScores, int kCount, int kParts>
DEVICE int chosen(const float (&x)[kCount], const Choice& c, float log_total, float* row, const Team<kParts>& team) {
  uint32_t keys[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int expert = expert_of<kCount>(i, team);
    float compared = x[i];
    if (c.bias || c.groups > 1) {
      compared = x[i] == -kInfinity ? 0.f : expf(log_score<kScores>(x[i]) - log_total);
      if (c.bias && expert < c.rule.experts) compared += c.bias[expert];
    }
    keys[i] = expert < c.rule.experts ? key_of(compared) : 0;
  }
  if (c.groups > 1) keep_best_groups(keys, row, c, team);
  int id = -1;
  for (int j = 0; j < c.rule.top_k; ++j) {
    const int expert = take_best(keys, team);
    if (team.lane == j) id = expert;
  }
  return id;
}

// The parameter of both kernels. Each begins beside the one before it, since every launch costs microseconds.
struct ChoiceLaunch {
  Choice choice;
  TokenStretches stretches;
  bool vectors;
};

template <Scores kScores, int kCount, int kParts>
__global__ void __launch_bounds__(kThreadsOfBlock<kParts>, 1) choose_experts(const __grid_constant__ ChoiceLaunch p) {
  extern __shared__ __align__(16) float shared[];
  ptx::let_next_kernel_begin();
  ptx::wait_for_earlier_kernels();
  constexpr int kTeams = kTeamsOfBlock<kParts>;
  const Choice& c = p.choice;
  const ChoiceRule& r = c.rule;
  const ChoiceShared layout(c, kTeams);
  const BlockSums block{r.experts, c.slots != nullptr};
  const int warp = threadIdx.x / 32, own = warp / kParts;
  const Team<kParts> team{static_cast<int>(threadIdx.x % 32), warp % kParts, reinterpret_cast<uint64_t*>(shared)};
  int* counters = reinterpret_cast<int*>(shared + ChoiceShared::kExchange);
  float* rows = shared + ChoiceShared::kExchange + layout.counters;
  for (int i = threadIdx.x; i < layout.counters; i += kThreadsOfBlock<kParts>) counters[i] = 0;
  __syncthreads();

  float of_experts[kCount] = {}, squares = 0.f;
  const int64_t begin = blockIdx.x * p.stretches.tokens, end = min(r.tokens, begin + p.stretches.tokens);
  for (int64_t token = begin + own; token < end; token += kTeams) {
    const int64_t slot = token * r.top_k + team.lane;
    const bool writes = team.part == 0 && team.lane < r.top_k;
    if (c.valid && !c.valid[token]) {
      if (writes) c.ids[slot] = -1, c.weights[slot] = 0.f;
      continue;
    }
    float x[kCount];
    load_logits(x, r, token, p.vectors, team);
    const float highest = highest_of(x, team);
    const bool regular = is_finite(highest), tallied = block.tallied && regular, by_scores = c.bias || c.groups > 1;
    float log_total = 0.f;  // the logarithm that softmax divides by
    if (tallied || (kScores == Scores::kSoftmax && (by_scores || !r.normalize))) {
      const float top = log_score<kScores>(highest), total = total_of<kScores>(x, highest, team);
      if (kScores == Scores::kSoftmax) log_total = top + logf(total);
      if (tallied) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          of_experts[i] += x[i] == -kInfinity ? 0.f : expf(log_score<kScores>(x[i]) - top) / total;
        float lse = log_total;
        if (kScores != Scores::kSoftmax) lse = highest + logf(total_of<Scores::kSoftmax>(x, highest, team));
        squares += lse * lse;
        if (team.part == 0 && team.lane == 0) atomicAdd(&counters[2 * r.experts], 1);
      }
    }
    int64_t id = c.given && team.lane < r.top_k ? c.given[slot] : -1;
    if (!__ballot_sync(~0u, id != -1))
      id = chosen<kScores>(x, c, log_total, rows + (c.groups > 1 ? own * layout.row : 0), team);
    const bool exists = id >= 0 && id < r.experts;
    const float at = exists ? read_number(r.logits, r.type, token * r.experts + id) : -kInfinity;
    const float weight = weight_of(exists ? log_score<kScores>(at) : -kInfinity, log_total, r.normalize);
    if (writes) {
      c.ids[slot] = id;
      c.weights[slot] = exists ? r.scale * weight : 0.f;
      if (exists) atomicAdd(&counters[id + (block.tallied && !regular ? r.experts : 0)], 1);  // whole: any order
    }
  }

  if (block.tallied) {
    __syncthreads();  // team after team, so that the order is one
    for (int turn = 0; turn < kTeams; ++turn) {
      if (own == turn) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int expert = expert_of<kCount>(i, team);
          if (expert < r.experts) rows[expert] = of_experts[i] + (turn ? rows[expert] : 0.f);
        }
        if (team.part == 0 && team.lane == 0) shared[0] = squares + (turn ? shared[0] : 0.f);
      }
      __syncthreads();
    }
  }
  __syncthreads();
  int32_t* out = c.workspace + blockIdx.x * block.words();
  for (int i = threadIdx.x; i < layout.counters; i += kThreadsOfBlock<kParts>) out[i] = counters[i];
  if (!block.tallied) return;
  float* sums = reinterpret_cast<float*>(out + layout.counters);
  for (int e = threadIdx.x; e < r.experts; e += kThreadsOfBlock<kParts>) sums[e] = rows[e];
  if (threadIdx.x == 0) sums[r.experts] = shared[0];
}

// 32 numbers per block: a warp adds those of some blocks, then the first warp adds the warps, always in this order.
constexpr int kAdders = 16;
__global__ void __launch_bounds__(32 * kAdders) add_blocks(const __grid_constant__ ChoiceLaunch p) {
  ptx::wait_for_earlier_kernels();
  __shared__ int64_t counts[kAdders][32], others[kAdders][32];
  __shared__ float sums[kAdders][32];
  const Choice& c = p.choice;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = c.rule.experts;
  const BlockSums block{experts, c.slots != nullptr};
  const int expert = blockIdx.x * 32 + lane, last = block.tallied ? experts : experts - 1;
  int64_t count = 0, other = 0;
  float sum = 0.f;
  if (expert <= last) {
#pragma unroll 4
    for (int b = warp; b < p.stretches.blocks; b += kAdders) {
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
  const ChoiceLaunch p{c, token_stretches(r.tokens, r.experts, kMostChoiceBlocks),
                       vectors_fit(4, {r.experts}, {r.logits})};
  const auto launch = [&](const void* kernel, int64_t blocks, int threads, size_t bytes) {
    FUSIBLE_CUDA_CHECK(launch_overlapping(kernel, static_cast<unsigned>(blocks), threads, bytes, stream, p),
                       "choice of ", r.top_k, " of ", r.experts, " experts by ", r.tokens, " tokens");
  };
  dispatch_choice(r, [&](auto scores, auto count, auto parts) {
    const auto kernel = reinterpret_cast<const void*>(
        &choose_experts<decltype(scores)::value, decltype(count)::value, decltype(parts)::value>);
    const size_t bytes = ChoiceShared(c, kTeamsOfBlock<decltype(parts)::value>).bytes();
    FUSIBLE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                       "choice of experts with ", bytes, " bytes of shared memory");
    launch(kernel, p.stretches.blocks, kThreadsOfBlock<decltype(parts)::value>, bytes);
  });
  const int numbers = r.experts + (c.slots != nullptr);
  launch(reinterpret_cast<const void*>(&add_blocks), blocks_of(numbers, 32), 32 * kAdders, 0);
}

}  // namespace fusible
