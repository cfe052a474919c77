// SPDX-License-Identifier: Apache-2.0
#include "fusible/gemm_config.h"

#include <algorithm>
#include <ostream>

namespace fusible {
namespace {

// Positions in kTileVariants, and what each was best at when all were timed on one H200 (docs/lab/experiments.md).
enum Variant : int {
  kTall = 1,         // weight gradients: of long groups, fewest bytes; fp32 of short groups, most room for old values
  kPadding = 2,      // where 192 divides the columns better than 256, weight gradients: most work per tile
  kShared = 3,       // long groups: the pair reads weights once, which saves power, so the clock is higher
  kDecode = 4,       // hardly any rows: most bytes in flight
  kSwapAb = 6,       // short groups, whose last tiles are cut to their tokens
  kSwapAbHigh = 7,   // the same, with fewest bytes and largest tasks
  kNarrow = 8,       // at most 64 columns, where reading the rows takes longer than multiplying them
  kSplitDepth = 10,  // weight gradients of few long groups: work for all multiprocessors
  kDeep = 9,         // short groups of deep products: fewer bytes than kSwapAb, and a shorter last round
};

// The columns that tiles of 192 multiply. The last one of a weight gradient may be narrower
// (kernels/gemm/grouped_gemm.cuh).
int64_t columns_of_medium_tiles(const GemmProblem& p) {
  const int64_t rest = p.n % 192;
  return p.layout == Layout::kTN && rest > 0 && rest <= 128 ? p.n - rest + 128 : blocks_of(p.n, 192) * 192;
}

// The higher ones need work for many rounds, as the last round is rarely full.
int choose_swap_ab(const GemmProblem& p, int multiprocessors) {
  constexpr int kRounds = 10;
  const int64_t high_tiles = (p.tokens / 192 + p.groups / 2) * blocks_of(p.n, 256);
  if (!p.scale_bias && high_tiles >= kRounds * multiprocessors) return kSwapAbHigh;
  return short_and_deep(p) ? kDeep : kSwapAb;
}

// Whether weight gradients in tiles of 256 x 192 take one round while those of 256 x 128, in pairs, take more.
bool medium_tiles_fit_one_round(const GemmProblem& p, int multiprocessors) {
  const int64_t rows = p.groups * blocks_of(p.m, 256);
  return p.output != DType::kFloat32 && !p.scale_bias && rows * blocks_of(p.n, 192) <= multiprocessors &&
         rows * blocks_of(p.n, 256) > multiprocessors / 2;
}

int choose_variant(const GemmProblem& p, int multiprocessors) {
  const double large = static_cast<double>(blocks_of(p.n, 256) * 256),
               medium = static_cast<double>(columns_of_medium_tiles(p));
  const bool pads = medium * 1.03 < large;
  const int64_t rows = p.tokens / p.groups;
  if (p.layout == Layout::kTN) {
    const double narrow = static_cast<double>(blocks_of(p.n, 128) * 128);
    const bool tall = bytes_decide(p) || medium > 1.05 * narrow || (rows >= 2048 && medium >= narrow);
    return tall && !pads && !medium_tiles_fit_one_round(p, multiprocessors) ? kTall : kPadding;
  }
  if (p.second_k) return short_groups(p) ? choose_swap_ab(p, multiprocessors) : kShared;
  if (rows <= 32 && p.k < 4096) return kDecode;
  if (p.n <= 64 && !p.scale_bias && p.output != DType::kFloat32) return kNarrow;
  if (pads && rows >= 384) return kPadding;
  return short_groups(p) ? choose_swap_ab(p, multiprocessors) : kShared;
}

// Positions in kScaledWgradVariants, likewise.
enum ScaledWgradVariant : int { kScaledWide = 0, kScaledTall = 1 };

// For short groups, tall tiles load fewer stages of the last block. They lack registers for fp32.
int choose_scaled_wgrad_variant(const GemmProblem& p) {
  return p.tokens / p.groups <= 512 && p.output != DType::kFloat32 ? kScaledTall : kScaledWide;
}

const char* name(DType type) {
  constexpr const char* kNames[] = {"fp32", "fp16", "bf16", "e4m3"};
  return kNames[static_cast<int>(type)];
}

// Completes the configuration of a tile: as many blocks as there is work for, and the way tasks are handed out.
GemmConfig complete(const GemmProblem& p, int multiprocessors, bool may_halve, int variant,
                    const TileVariant* variants) {
  const TileVariant& tile = variants[variant];
  // An upper bound on the tiles, whatever the sizes: every group may leave a rest.
  const int64_t rows = p.layout == Layout::kTN ? p.groups * blocks_of(p.m, may_halve ? kLeastRows : tile.tile_m)
                                               : p.tokens / tile.tile_m + std::min(p.groups, p.tokens);
  const int64_t slices = tile.split_k ? kMostSlices : 1;
  const int64_t clusters =
      std::min<int64_t>(multiprocessors / tile.cluster(), rows * slices * blocks_of(p.n, tile.tile_n));
  // With hardly any rows, zeroing the counter costs more than it gains.
  const bool hardly_any_rows = p.layout != Layout::kTN && p.tokens <= 64 * p.groups;
  return {.variant = variant,
          .grid = static_cast<int>(clusters) * tile.cluster(),
          .on_demand = !hardly_any_rows,
          .may_halve = may_halve,
          .variants = variants};
}

}  // namespace

GemmConfig choose_config(const GemmProblem& p, int multiprocessors, int variant, bool may_split) {
  const bool chosen = variant < 0;
  if (chosen) variant = choose_variant(p, multiprocessors);
  if (chosen && may_split && few_deep_tiles(p)) variant = kSplitDepth;
  if (p.scale_bias && !fits_scale_bias(kTileVariants[variant])) variant = kDecode;  // as many columns, half the rows
  const TileVariant& tile = kTileVariants[variant];
  const bool may_halve = chosen && p.layout == Layout::kTN && tile.tile_m > kLeastRows && !tile.split_k;
  return complete(p, multiprocessors, may_halve, variant, kTileVariants);
}

GemmConfig scaled_config(const GemmProblem& p, int multiprocessors) {
  return complete(p, multiprocessors, false, 0, &kScaledVariant);
}

GemmConfig packed_config(const GemmProblem& p, int multiprocessors) {
  return complete(p, multiprocessors, false, 0, &kPackedVariant);
}

GemmConfig choose_scaled_wgrad_config(const GemmProblem& p, int multiprocessors, int variant) {
  const bool chosen = variant < 0;
  if (chosen) variant = choose_scaled_wgrad_variant(p);
  const bool may_halve = chosen && kScaledWgradVariants[variant].tile_m > kLeastRows;
  return complete(p, multiprocessors, may_halve, variant, kScaledWgradVariants);
}

std::ostream& operator<<(std::ostream& out, const GemmProblem& p) {
  constexpr const char* kLayouts[] = {"NT", "NN", "TN"};
  out << "grouped GEMM " << kLayouts[static_cast<int>(p.layout)] << " " << name(p.operand) << " -> " << name(p.output)
      << ", " << p.groups << " groups, " << p.tokens << " tokens, ";
  if (p.layout == Layout::kTN) out << "m " << p.m << ", n " << p.n;
  else out << "n " << p.n << ", k " << p.k;
  if (p.second_k) out << " + " << p.second_k;
  return out << (p.scale_bias ? ", with bias or scales" : "");
}
std::ostream& operator<<(std::ostream& out, const GemmConfig& c) {
  const TileVariant& tile = c.tile();
  out << "tile " << tile.tile_m << " x " << tile.tile_n << ", cluster " << tile.cluster_m << " x " << tile.cluster_n
      << ", " << tile.stages << " stages, ";
  if (tile.swap_ab) out << "swap_ab, ";
  if (tile.split_k) out << "the depth split where long groups are few, ";
  if (c.may_halve) out << "halved where long groups are few, ";
  return out << c.grid << " blocks, tasks " << (c.on_demand ? "on demand" : "in a fixed order");
}

}  // namespace fusible
