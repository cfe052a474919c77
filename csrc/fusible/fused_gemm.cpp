// SPDX-License-Identifier: Apache-2.0
#include "fusible/fused_gemm.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "fusible/activation_launch.h"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_launch.h"
#include "fusible/jit_kernel.h"
#include "kernels/activation/activation_entry.h"

namespace fusible {
namespace {

constexpr int64_t kWidest = 768;  // columns that every tile divides, so that no tile's subtiles reach further

// The offset in the workspace, after the common part of every grouped GEMM.
int64_t dscale_partials_offset(int64_t groups) { return blocks_of(workspace_bytes(groups), 16) * 16; }
int64_t dbias_partials_offset(int64_t groups, int64_t tokens, int64_t columns, bool dscales) {
  const int64_t dscale_partials = dscales ? blocks_of(columns, kWidest) * (kWidest / 64) * tokens : 0;
  return dscale_partials_offset(groups) + blocks_of(dscale_partials, 4) * 16;
}
int64_t dvector_partials_offset(int64_t groups, int64_t tokens, int64_t columns, bool dscales, int64_t bias_columns) {
  const int64_t end =
      dbias_partials_offset(groups, tokens, columns, dscales) + column_partials_bytes(groups, tokens, bias_columns);
  return blocks_of(end, 16) * 16;
}

template <int kCount>
bool built_for(const int (&variants)[kCount], int variant) {
  return std::find(std::begin(variants), std::end(variants), variant) != std::end(variants);
}

// body(layout, operand) of a product whose rows are tokens.
template <class Body>
KernelEntry dispatch_product(const GemmProblem& p, const Body& body) {
  return dispatch<Layout::kNT, Layout::kNN>(p.layout, [&](auto layout) {
    return dispatch_dtype_of_16_bits(p.operand, [&](auto operand) { return body(layout, operand); });
  });
}
KernelEntry forward_entry(const GemmProblem& p, bool halves, int variant) {
  return dispatch_product(p, [&](auto layout, auto operand) {
    if (p.second_k)
      return pair_activation_entry<decltype(layout)::value, decltype(operand)::value>(halves, p.scale_bias, variant);
    return activation_entry<decltype(layout)::value, decltype(operand)::value>(halves, p.scale_bias, variant);
  });
}
KernelEntry backward_entry(const GemmProblem& p, int variant) {
  return dispatch_product(p, [&](auto layout, auto operand) {
    if (p.second_k) return pair_activation_backward_entry<decltype(layout)::value, decltype(operand)::value>(variant);
    return activation_backward_entry<decltype(layout)::value, decltype(operand)::value>(variant);
  });
}

// The built-in kernel, or a user function's.
template <int kCount>
KernelEntry entry_of_function(const KernelEntry& built_in, const Activation& a, const int (&variants)[kCount],
                              int variant) {
  const int* const at = std::find(std::begin(variants), std::end(variants), variant);
  return at == std::end(variants) ? built_in : in_place_of(built_in, a.kernels[at - std::begin(variants)]);
}

// The map of weights whose halves are gate and up.
CUtensorMap gate_up_map(const GemmProblem& p, const MatrixView& weights, int64_t columns, int64_t k,
                        const GemmConfig& config) {
  return p.layout == Layout::kNT ? gate_up_rows_map(weights, p.groups, columns, k, config.tile().tile_n)
                                 : gate_up_columns_map(weights, p.groups, columns, k);
}

int64_t columns_of_preact(const LinearActivationBackward& call) {
  return call.activation.gated ? 2 * call.gemm.problem.n : call.gemm.problem.n;
}

// The gradients of the bias and of column operands, if they are wanted, from the sums of blocks.
void sum_columns(const LinearActivationBackward& call, const ActivationParams& params, cudaStream_t stream) {
  const GemmProblem& p = call.gemm.problem;
  ColumnSumsOfBlocks sums{.sizes = call.gemm.sizes, .tokens = static_cast<int>(p.tokens)};
  if (call.dbias)
    sums.outputs[sums.count++] = {.partials = params.dbias_partials,
                                  .columns = static_cast<int>(columns_of_preact(call)),
                                  .out = call.dbias,
                                  .type = call.dbias_type};
  add_dvectors(sums, call.dvectors, params.dvector_partials, static_cast<int>(p.n),
               static_cast<int>(call.activation.block));
  sum_column_partials(sums, stream);
}

}  // namespace

void check_vectors(const GemmProblem& p, const Activation& a, const ColumnVectors& vectors) {
  FUSIBLE_CHECK(!vectors.count || a.kernels[0], "numbers of columns are for compiled functions. ", p);
}

bool has_halves(const Activation& a, int64_t columns) { return a.gated && a.block == columns; }

bool block_fits(const Activation& a, int64_t columns, const TileVariant& tile) {
  if (!a.gated || has_halves(a, columns)) return true;
  return a.block == 1 || a.block == 2 || a.block == 4 ||
         (a.block % 8 == 0 && tile.smem_out_columns() % (2 * a.block) == 0);
}

void check_activation(const GemmProblem& p, const Activation& a, int64_t columns) {
  FUSIBLE_CHECK(columns > 0 && columns % 8 == 0, "the hidden rows must have a multiple of 8 columns, got ", columns,
                ". ", p);
  FUSIBLE_CHECK(!a.gated || (a.block > 0 && columns % a.block == 0), "blocks of ", a.block, " columns do not divide ",
                columns, ". ", p);
}

ActivationParams activation_params(const GroupedGemm& gemm, const GemmConfig& config, const Activation& a,
                                   const RowScale& scales, int64_t columns, cudaStream_t stream) {
  ActivationParams params{};
  static_cast<GemmParams&>(params) = prepare_params(gemm, config, stream);
  params.activation = a;
  if (!a.gated) params.activation.limit = std::numeric_limits<float>::infinity(), params.activation.linear_offset = 0;
  params.scales = scales;
  params.columns = static_cast<int>(columns);
  params.block = static_cast<int>(a.gated ? a.block : columns);
  return params;
}

// As for a plain product: short groups have swap_ab tiles, and a pair of blocks reads the weights once.
GemmConfig choose_activation_config(const GemmProblem& p, const Activation& a, int multiprocessors, int variant) {
  constexpr int kShared = kActivationVariants[0], kSwapAb = kActivationVariants[1], kDeep = kDeepActivationVariant;
  const bool takes_deep = !p.scale_bias && !p.second_k && (!a.kernels[0] || a.kernels[2]);
  if (variant < 0) {
    const bool swaps = short_groups(p) && block_fits(a, p.n / 2, kTileVariants[kSwapAb]);
    variant = !swaps ? kShared : takes_deep && short_and_deep(p) ? kDeep : kSwapAb;
  }
  FUSIBLE_CHECK(built_for(kActivationVariants, variant) || (variant == kDeep && takes_deep), "tile variant ", variant,
                " is not built with this activation. ", p);
  FUSIBLE_CHECK(block_fits(a, p.n / 2, kTileVariants[variant]), "blocks of ", a.block,
                " columns do not fit into a tile. ", p);
  return choose_config(p, multiprocessors, variant);
}

// Six warps store a tile of 192 columns; a pair of blocks that share B asks least of the L2 cache, which the epilogue
// needs as well.
GemmConfig choose_backward_config(const GemmProblem& p, int multiprocessors, int variant) {
  if (variant < 0) variant = kBackwardVariants[0];
  FUSIBLE_CHECK(built_for(kBackwardVariants, variant), "tile variant ", variant,
                " is not built with the backward of an activation. ", p);
  return choose_config(p, multiprocessors, variant);
}

int64_t backward_workspace_bytes(int64_t groups, int64_t tokens, int64_t columns, bool dscales, int64_t bias_columns,
                                 int64_t dvectors) {
  return dvector_partials_offset(groups, tokens, columns, dscales, bias_columns) +
         column_partials_bytes(groups, tokens, dvectors * columns);
}

void linear_activation(const LinearActivation& call, int device, cudaStream_t stream) {
  GroupedGemm gemm = as_strided(call.gemm);
  const GemmProblem& p = gemm.problem;
  const bool keep_preact = gemm.out.data != nullptr;
  const int64_t columns = call.activation.gated ? p.n / 2 : p.n;
  FUSIBLE_CHECK(p.layout != Layout::kTN && p.output == p.operand,
                "an activation needs a forward product into the operands' type. ", p);
  if (!keep_preact) gemm.out = {call.postact, p.operand, columns, 0};  // a map of it is made, and not used
  if (call.arrivals.blocks) gemm.zeroed = true;
  check(gemm, device);
  check_activation(p, call.activation, columns);
  check_vectors(p, call.activation, call.vectors);
  if (p.tokens == 0) return;
  const DeviceGuard guard(device);
  const GemmConfig config =
      choose_activation_config(p, call.activation, device_properties(device).multiprocessors, gemm.variant);
  WithSecondPair<ActivationParams> params{
      activation_params(gemm, config, call.activation, call.scales, columns, stream), second_pair(gemm, config)};
  const bool halves = has_halves(call.activation, columns);
  if (halves) {
    params.b = gate_up_map(p, gemm.b, columns, p.k, config);
    if (p.second_k) params.second.b = gate_up_map(p, gemm.second_b, columns, p.second_k, config);
    if (keep_preact) params.out = gate_up_output_map(gemm.out, p.tokens, columns);
    params.epilogue.half = static_cast<int>(columns);
  }
  params.keep_preact = keep_preact;
  params.postact = call.postact;
  std::ranges::copy(call.vectors.data, params.vectors);
  // Addresses of matrices are brought by a kernel in between, for which only the others wait.
  if (call.arrivals.blocks && gemm.b.addresses.empty() && gemm.epilogue.bias.addresses.empty()) {
    FUSIBLE_CHECK(
        p.layout == Layout::kNT && p.operand == DType::kBFloat16 && !p.second_k && !call.activation.kernels[0],
        "rows that arrive are of bf16, for weights [N, K] and a built-in activation. ", p);
    const WithArrivals<ActivationParams> arriving{params, call.arrivals};
    const auto entry = arriving_activation_entry<Layout::kNT, DType::kBFloat16>(halves, p.scale_bias, config.variant);
    return launch(arriving, entry, config, p, device, stream);
  }
  const KernelEntry entry = forward_entry(p, halves, config.variant);
  launch(params, entry_of_function(entry, call.activation, kFunctionVariants, config.variant), config, p, device,
         stream);
}

void linear_activation_backward(const LinearActivationBackward& call, int device, cudaStream_t stream) {
  GroupedGemm gemm = as_strided(call.gemm);
  const GemmProblem& p = gemm.problem;
  FUSIBLE_CHECK(p.layout != Layout::kTN && p.output == p.operand && !p.scale_bias,
                "the backward of an activation needs the plain gradient of its rows. ", p);
  FUSIBLE_CHECK(!(call.dscales || call.dbias || !call.dvectors.empty()) || gemm.workspace,
                "the gradients of scales, bias and column operands need a workspace. ", p);
  gemm.out = {call.dpreact, p.operand, p.n, 0};  // a map of it is made, and not used
  check(gemm, device);
  check_activation(p, call.activation, p.n);
  check_vectors(p, call.activation, call.vectors);
  const DeviceGuard guard(device);
  if (p.tokens == 0) return sum_columns(call, {}, stream);
  const GemmConfig config = choose_backward_config(p, device_properties(device).multiprocessors, gemm.variant);
  WithSecondPair<ActivationParams> params{activation_params(gemm, config, call.activation, call.scales, p.n, stream),
                                          second_pair(gemm, config)};
  params.preact = call.preact;
  params.dpreact = call.dpreact;
  params.postact = call.postact;
  char* workspace = static_cast<char*>(gemm.workspace);
  if (call.dscales) params.dscale_partials = reinterpret_cast<float*>(workspace + dscale_partials_offset(p.groups));
  if (call.dbias)
    params.dbias_partials =
        reinterpret_cast<float*>(workspace + dbias_partials_offset(p.groups, p.tokens, p.n, call.dscales));
  std::ranges::copy(call.vectors.data, params.vectors);
  if (!call.dvectors.empty())
    params.dvector_partials =
        reinterpret_cast<float*>(workspace + dvector_partials_offset(p.groups, p.tokens, p.n, call.dscales,
                                                                     call.dbias ? columns_of_preact(call) : 0));
  const KernelEntry entry = backward_entry(p, config.variant);
  launch(params, entry_of_function(entry, call.activation, kBackwardVariants, config.variant), config, p, device,
         stream);
  if (call.dscales)
    sum_dscale_partials(params.dscale_partials, static_cast<int>(blocks_of(p.n, 64)), p.tokens, gemm.sizes,
                        call.dscales, call.scales.type, stream);
  sum_columns(call, params, stream);
}

}  // namespace fusible
