// SPDX-License-Identifier: Apache-2.0
// A grouped GEMM as numbers: the problem, and the configuration that is chosen for it. No CUDA here.
#pragma once
#include <cstdint>
#include <iosfwd>

#include "fusible/dtype.h"

namespace fusible {

// How many blocks of a size n needs.
constexpr int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// The depth of a stage: 128 bytes of values.
constexpr int tile_k(int64_t element_bytes) { return static_cast<int>(128 / element_bytes); }
constexpr int tile_k(DType type) { return tile_k(bytes_of(type)); }

// The ragged operand and its form. Rows of `a` (and of `out`, or the depth) are tokens sorted by group.
enum class Layout : int {
  kNT = 0,  // out[T, n] = a[T, k] b[E, n, k]^T
  kNN = 1,  // out[T, n] = a[T, k] b[E, k, n]
  kTN = 2,  // out[E, m, n] = a[T, m]^T b[T, n] of each group
};

// The compile-time configuration of a kernel: tiles of tile_m x tile_n; two blocks of a cluster that share operands,
// stacked (cluster_m = 2) or side by side (cluster_n = 2); `stages` of 64 values of depth in flight; `raster_swizzle`
// and `highest_first` are explained in device/gemm/tile_scheduler.cuh, `swap_ab` in device/gemm/swap_ab.cuh, `split_k`
// in device/gemm/split_k.cuh.
struct TileVariant {
  int tile_m, tile_n, cluster_m, cluster_n, stages, raster_swizzle;
  bool swap_ab = false, highest_first = false, split_k = false;
  constexpr int cluster() const { return cluster_m * cluster_n; }
  constexpr bool large() const {
    return tile_m * tile_n > 160 * 256;
  }  // leaves few registers beside the accumulators, and little shared memory
  constexpr bool packed() const { return swap_ab && tile_n == 128; }  // weights, which take few bytes of a stage
  constexpr int token_box() const { return swap_ab ? 32 : 64; }       // tokens that a copy moves
  constexpr int cut() const { return swap_ab ? 16 : 64; }             // rows that tiles of a group do not share
  // The bytes that a consumer stores to shared memory at a time.
  constexpr int smem_out_bytes() const {
    return packed() ? 12288 : tile_n == 64 ? 16384 : tile_n == 192 || large() ? 24576 : 32768;
  }
  constexpr int smem_out_rows() const { return swap_ab && (large() || packed()) ? 32 : 64; }
  constexpr int smem_out_columns() const { return swap_ab ? tile_n / 2 : tile_n; }
};
inline constexpr TileVariant kTileVariants[] = {
    {128, 256, 1, 1, 3, 8},  // for groups of any shapes alone (kernels/ragged/ragged.h)
    {256, 128, 1, 2, 3, 8},
    {256, 192, 1, 1, 3, 4},
    {128, 256, 2, 1, 3, 8},
    {128, 192, 1, 1, 4, 8},
    {128, 192, 2, 1, 4, 8},  // for an epilogue alone (fused_gemm.h)
    {128, 256, 2, 1, 3, 8, true},
    {192, 256, 2, 1, 3, 8, true},
    {128, 64, 1, 1, 7, 8},
    {160, 256, 2, 1, 3, 8, true, true},
    {256, 192, 1, 1, 3, 4, false, false, true},
};
// For e4m3 operands: each consumer has two units of 64 x 128 (device/gemm/scaled_mainloop.cuh).
inline constexpr TileVariant kScaledVariant = {128, 256, 2, 1, 3, 8};  // of rows of tokens
inline constexpr TileVariant kScaledWgradVariants[] = {{128, 256, 2, 1, 3, 8}, {256, 128, 1, 2, 3, 8}};
// For packed weights: the pair shares the tokens, which have nearly all bytes.
inline constexpr TileVariant kPackedVariant = {256, 128, 1, 2, 5, 8, true};
// Rows of a tile of weight gradients: with few long groups, higher tiles are halved (device/gemm/tile_scheduler.cuh).
inline constexpr int kLeastRows = 128;
// Limits for a split depth of weight gradients: tiles times slices of the split groups, and slices of a group.
inline constexpr int kMostSlicedTasks = 160, kMostSlices = 8;
inline constexpr int kMostSortedGroups = 256;  // more keep the order that they have, and their depth whole
inline constexpr int kTileVariantCount = sizeof(kTileVariants) / sizeof(kTileVariants[0]);
// Bias and factors need registers beside the accumulators, and shared memory. The narrow tile has none, as no product
// asks for them.
constexpr bool fits_scale_bias(const TileVariant& tile) {
  return !tile.large() && tile.tile_n > 64 && !tile.highest_first;
}
// Only tiles that some problem has a use for are compiled: 256 columns for rows of tokens, 256 rows for weight
// gradients, half of which where bias or factors leave no room for more.
constexpr bool is_built(Layout layout, const TileVariant& tile, bool fp32_output, bool scale_bias) {
  if (scale_bias && !fits_scale_bias(tile)) return false;
  if ((tile.tile_n == 192 && tile.cluster() > 1) || (tile.tile_n == 256 && tile.cluster() == 1))
    return false;  // as said there
  if ((tile.swap_ab || tile.tile_n == 64) && fp32_output) return false;
  if (tile.split_k) return layout == Layout::kTN && !fp32_output;
  if (tile.tile_n == 64) return layout != Layout::kTN;
  return layout == Layout::kTN ? tile.tile_n != 256 && (tile.tile_m == 256 || scale_bias) : tile.tile_n != 128;
}
// The variants for products with a second pair of operands.
inline constexpr int kPairVariants[] = {3, 6, 7};
inline constexpr int kSharedMemoryLimit = 232448;  // of a block on sm_90

struct GemmProblem {
  Layout layout;
  DType operand, output;
  bool scale_bias;  // bias or scales
  int64_t groups, tokens;
  int64_t m;             // output rows of a group, kTN only
  int64_t n, k;          // output columns; depth (not kTN)
  int64_t second_k = 0;  // depth of a second pair of operands, whose product is added; 0: no second pair
};

// Whether an fp32 weight gradient takes longer to get through memory than to multiply.
constexpr bool bytes_decide(const GemmProblem& p) {
  return p.layout == Layout::kTN && p.output == DType::kFloat32 && p.tokens / p.groups < 768;
}
// So much longer that waiting for memory between two products costs nothing.
constexpr bool bytes_alone_decide(const GemmProblem& p) { return bytes_decide(p) && p.tokens / p.groups < 384; }

// Whether what swap_ab tiles save at the ends of groups is more than they cost.
constexpr bool short_groups(const GemmProblem& p) {
  return p.layout != Layout::kTN && p.output != DType::kFloat32 && p.tokens / p.groups <= 1024;
}

// Whether deep products of short groups are few rounds of long tasks, and nothing but the product is asked for: higher
// tiles, the highest first. With 200 and 256 rows per group and depths of 4096 and 7168, all that was faster was so.
constexpr bool short_and_deep(const GemmProblem& p) {
  const int64_t rows = p.tokens / p.groups;
  return short_groups(p) && p.k >= 4096 && rows >= 160 && rows <= 320 && !p.scale_bias && !p.second_k;
}

struct GemmConfig {
  int variant;     // index into `variants`
  int grid;        // blocks
  bool on_demand;  // tasks are handed out by a counter in the workspace, if there is one
  bool may_halve;  // tiles may have kLeastRows, as the sizes of the groups decide; not where a variant is asked for

  const TileVariant* variants = kTileVariants;

  const TileVariant& tile() const { return variants[variant]; }
};

// Whether weight gradients are so few tiles that half of the multiprocessors are idle, and so deep that it pays to
// split that.
constexpr bool few_deep_tiles(const GemmProblem& p) {
  return p.layout == Layout::kTN && p.output != DType::kFloat32 && !p.scale_bias && p.tokens >= 4096 * p.groups &&
         2 * p.groups * blocks_of(p.m, 256) * blocks_of(p.n, 192) <= kMostSlicedTasks;
}

// Depends on nothing but the problem and the number of multiprocessors: never on the sizes of the groups. `variant` < 0
// lets the cost model choose; `may_split`: there is room for the sums of a split depth.
GemmConfig choose_config(const GemmProblem& problem, int multiprocessors, int variant = -1, bool may_split = false);
// For e4m3 operands.
GemmConfig scaled_config(const GemmProblem& problem, int multiprocessors);
GemmConfig choose_scaled_wgrad_config(const GemmProblem& problem, int multiprocessors, int variant = -1);
// For bf16 rows and packed weights.
GemmConfig packed_config(const GemmProblem& problem, int multiprocessors);

std::ostream& operator<<(std::ostream& out, const GemmProblem& problem);
std::ostream& operator<<(std::ostream& out, const GemmConfig& config);

}  // namespace fusible
