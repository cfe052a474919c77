// SPDX-License-Identifier: Apache-2.0
// The blocks of a choice, and the step from its sizes to code that is compiled for them.
#pragma once
#include <algorithm>

#include "fusible/choice.h"
#include "fusible/error.h"
#include "fusible/gemm_config.h"

namespace fusible {

// A choice adds up the numbers of its blocks; a gradient has none, so as many blocks as keep the device busy.
constexpr int kMostChoiceBlocks = 256, kMostGradientBlocks = 1024;

// One warp a token up to 1024 experts, else all four warps of a block.
template <int kParts>
inline constexpr int kTeamsOfBlock = kParts == 1 ? 8 : 1;
template <int kParts>
inline constexpr int kThreadsOfBlock = 32 * kParts * kTeamsOfBlock<kParts>;

// Stretches of tokens, which depend on no device, so that sums have one order everywhere.
struct TokenStretches {
  int64_t tokens;
  int blocks;
};
inline TokenStretches token_stretches(int64_t tokens, int experts, int most_blocks) {
  const int64_t wanted =
      std::clamp<int64_t>(blocks_of(tokens, experts > 1024 ? kTeamsOfBlock<4> : kTeamsOfBlock<1>), 1, most_blocks);
  const int64_t stretch = std::max<int64_t>(1, blocks_of(tokens, wanted));
  return {stretch, static_cast<int>(std::max<int64_t>(1, blocks_of(tokens, stretch)))};
}

inline void check_rule(const ChoiceRule& c) {
  FUSIBLE_CHECK(c.experts >= 1 && c.experts <= kMaxChoiceExperts, "1 to ", kMaxChoiceExperts,
                " experts can be chosen from, got ", c.experts);
  FUSIBLE_CHECK(c.top_k >= 1 && c.top_k <= kMaxChoices && c.top_k <= c.experts, "1 to ", kMaxChoices,
                " of the experts can be chosen, got ", c.top_k, " of ", c.experts);
}

// body(scores, count, parts), each as std::integral_constant.
template <class Body>
void dispatch_choice(const ChoiceRule& c, const Body& body) {
  dispatch<Scores::kSoftmax, Scores::kSigmoid, Scores::kSqrtSoftplus>(c.scores, [&](auto scores) {
    const auto of = [&](auto count, auto parts) { body(scores, count, parts); };
    using One = std::integral_constant<int, 1>;
    if (c.experts <= 128) of(std::integral_constant<int, 4>(), One());
    else if (c.experts <= 256) of(std::integral_constant<int, 8>(), One());
    else if (c.experts <= 512) of(std::integral_constant<int, 16>(), One());
    else if (c.experts <= 1024) of(std::integral_constant<int, 32>(), One());
    else of(std::integral_constant<int, 32>(), std::integral_constant<int, 4>());
  });
}

}  // namespace fusible
