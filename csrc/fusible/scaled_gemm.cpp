// SPDX-License-Identifier: Apache-2.0
#include "fusible/scaled_gemm.h"

#include <algorithm>
#include <iterator>

#include "fusible/activation_launch.h"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/jit_kernel.h"
#include "kernels/scaled/scaled_params.h"

namespace fusible {
namespace {

void check_scales(const char* name, const float* scales, const GemmProblem& p) {
  FUSIBLE_CHECK(scales && reinterpret_cast<uintptr_t>(scales) % 16 == 0, name,
                " are not given, or not aligned to 16 bytes. ", p);
}

void check_operands(const GroupedGemm& call, int device) {
  const GemmProblem& p = call.problem;
  const int64_t variants = p.layout == Layout::kTN ? std::ssize(kScaledWgradVariants) : 1;
  FUSIBLE_CHECK(call.variant < variants, "there is no tile variant ", call.variant, ". ", p);
  FUSIBLE_CHECK(p.operand == DType::kE4M3 && call.a.type == p.operand && call.b.type == p.operand,
                "operands must be e4m3. ", p);
  FUSIBLE_CHECK(p.output != DType::kE4M3 && call.out.type == p.output, "output must be fp32, fp16 or bf16. ", p);
  check_shapes(call, device);
}

KernelEntry built(const KernelEntry& entry, const GemmConfig& config, const GemmProblem& p) {
  FUSIBLE_CHECK(entry.function, "tile variant ", config.variant, " is not built for it. ", p);
  return entry;
}

bool last_tile_is_narrow(const GemmProblem& p, const TileVariant& tile) {
  return (p.n - 1) % tile.tile_n < kScaleBlock;
}

// A tile has 128 columns of either half.
template <class P>
void set_halves(Params1D2D<P>& params, const GroupedGemm& gemm, const TileVariant& tile) {
  const GemmProblem& p = gemm.problem;
  const int64_t half = p.n / 2;
  params.shape.narrow_end = false;
  params.b = gate_up_rows_map(gemm.b, p.groups, half, p.k, tile.tile_n);
  params.out = gate_up_output_map(gemm.out, p.tokens, half);
  params.epilogue.half = static_cast<int>(half);
  params.b_scales.tile_step = 1, params.b_scales.unit_step = static_cast<int>(blocks_of(half, kScaleBlock));
}

void check_call(const ScaledGemm& call, const GroupedGemm& gemm, int device) {
  const GemmProblem& p = gemm.problem;
  check_operands(gemm, device);
  FUSIBLE_CHECK(p.k % 16 == 0, "k must be a multiple of 16. ", p);
  FUSIBLE_CHECK(!call.halves || p.n % 16 == 0, "the columns of a half must be multiples of 8. ", p);
  if (p.tokens == 0) return;
  check_scales("the scales of a", call.a_scales, p);
  FUSIBLE_CHECK(call.b_scales, "the scales of b are not given. ", p);
}

// The scales of operands whose blocks of columns are consecutive.
template <class P>
void set_scales(Params1D2D<P>& params, const ScaledGemm& call, const GemmProblem& p, const TileVariant& tile) {
  params.shape.narrow_end = last_tile_is_narrow(p, tile);
  params.a_scales = scales_map(call.a_scales, p.tokens, params.k_blocks, row_scales_pitch(p.tokens), kRowScalesBox);
  params.b_scales = {.data = call.b_scales,
                     .group = call.b_scales_group,
                     .row = call.b_scales_row,
                     .column = call.b_scales_column,
                     .tile_step = static_cast<int>(tile.tile_n / kScaleBlock),
                     .unit_step = 1};
}

}  // namespace

void scaled_gemm(const ScaledGemm& call, int device, cudaStream_t stream) {
  const GroupedGemm gemm = as_strided(call.gemm);
  const GemmProblem& p = gemm.problem;
  check_call(call, gemm, device);
  if (p.tokens == 0) return;
  const DeviceGuard guard(device);
  const bool restarts = call.halves && p.n / 2 % kScaleBlock != 0;  // otherwise the second half begins with a block
  const GemmConfig config = scaled_config(p, device_properties(device).multiprocessors);
  const TileVariant& tile = config.tile();
  Params1D2D<GemmParams> params{prepare_params(gemm, config, stream)};
  set_scales(params, call, p, tile);
  if (restarts) set_halves(params, gemm, tile);
  launch(params, built(scaled_entry(p.output, p.scale_bias, restarts), config, p), config, p, device, stream);
}

void row_scaled_gemm(const RowScaledGemm& call, int device, cudaStream_t stream) {
  const GroupedGemm gemm = as_strided(call.gemm);
  const GemmProblem& p = gemm.problem;
  check_operands(gemm, device);
  FUSIBLE_CHECK(p.k % 16 == 0, "k must be a multiple of 16. ", p);
  if (p.tokens == 0) return;
  FUSIBLE_CHECK(call.a_scales && call.b_scales, "the scales of a or of b are not given. ", p);
  const DeviceGuard guard(device);
  const GemmConfig config = scaled_config(p, device_properties(device).multiprocessors);
  GemmParams params = prepare_params(gemm, config, stream);
  params.shape.narrow_end = last_tile_is_narrow(p, config.tile());
  params.epilogue.operands = {
      .of_a = call.a_scales, .of_b = call.b_scales, .b_group = call.b_scales_group, .b_row = call.b_scales_row};
  launch(params, built(row_scaled_entry(p.output, call.fast), config, p), config, p, device, stream);
}

void scaled_activation(const ScaledActivation& call, int device, cudaStream_t stream) {
  GroupedGemm gemm = as_strided(call.product.gemm);
  const GemmProblem& p = gemm.problem;
  const Activation& activation = call.activation;
  const bool keep_preact = gemm.out.data != nullptr;
  const int64_t columns = activation.gated ? p.n / 2 : p.n;
  if (!keep_preact) gemm.out = {call.rows.data, p.output, columns, 0};  // a map of it is made, and not used
  check_call(call.product, gemm, device);
  check_activation(p, activation, columns);
  check_vectors(p, activation, call.vectors);
  FUSIBLE_CHECK(!gemm.epilogue.row_scale && !gemm.epilogue.alphas, "an activation takes no factors but its own. ", p);
  if (p.tokens == 0) return;
  const DeviceGuard guard(device);
  const GemmConfig config = scaled_config(p, device_properties(device).multiprocessors);
  const TileVariant& tile = config.tile();
  const bool halves = has_halves(activation, columns);
  FUSIBLE_CHECK(halves ? columns % kScaleBlock == 0 : block_fits(activation, columns, tile), "blocks of ",
                activation.block, " columns do not fit into a tile. ", p);
  Params1D2D<QuantizedActivationParams> params{};
  static_cast<ActivationParams&>(params) = activation_params(gemm, config, activation, call.scales, columns, stream);
  set_scales(params, call.product, p, tile);
  if (halves) set_halves(params, gemm, tile);
  params.keep_preact = keep_preact;
  params.rows = call.rows, params.rows.scales_pitch = row_scales_pitch(p.tokens);
  params.power_of_two = call.power_of_two;
  std::ranges::copy(call.vectors.data, params.vectors);
  const KernelEntry entry = built(scaled_activation_entry(p.output, halves, p.scale_bias), config, p);
  launch(params, in_place_of(entry, activation.kernels[0]), config, p, device, stream);
}

void scaled_wgrad(const ScaledWgrad& call, int device, cudaStream_t stream) {
  const GroupedGemm gemm = as_strided(call.gemm);
  const GemmProblem& p = gemm.problem;
  check_operands(gemm, device);
  check_scales("the scales of a", call.a_scales, p);
  check_scales("the scales of b", call.b_scales, p);
  const DeviceGuard guard(device);
  if (p.tokens == 0) {
    if (!gemm.accumulate) zero_output(gemm, stream);
    return;
  }
  const GemmConfig config = choose_scaled_wgrad_config(p, device_properties(device).multiprocessors, gemm.variant);
  const TileVariant& tile = config.tile();
  const int64_t blocks = p.tokens / kScaleBlock + p.groups;
  Params1D1D<GemmParams> params{prepare_shape(gemm, config, stream)};
  params.a = blocked_tokens_map(gemm.a, blocks, p.m, 64);
  params.b = blocked_tokens_map(gemm.b, blocks, p.n, tile.tile_n / 2);
  params.out = weight_output_map(gemm.out, p.groups, p.m, p.n);
  params.shape.narrow_end = last_tile_is_narrow(p, tile);
  params.a_scales = scales_map(call.a_scales, p.m, blocks, p.m, tile.tile_m);
  params.b_scales = scales_map(call.b_scales, p.n, blocks, p.n, tile.tile_n);
  launch(params, built(scaled_wgrad_entry(p.output, config.variant), config, p), config, p, device, stream);
}

}  // namespace fusible
