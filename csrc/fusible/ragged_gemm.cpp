// SPDX-License-Identifier: Apache-2.0
#include "fusible/ragged_gemm.h"

#include <algorithm>

#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_launch.h"
#include "fusible/wrong_sizes.h"

namespace fusible {
namespace {

constexpr TileVariant kTile = kTileVariants[kRaggedVariant];

// For error texts.
GemmProblem problem_of(const RaggedGemm& call) {
  return {call.layout, call.operand, call.output, true, call.groups, 0, 0, 0, 0};
}

void check(const RaggedGemm& call, int device) {
  check_device(problem_of(call), device);
  FUSIBLE_CHECK(call.operand != DType::kFloat32 && (call.output == call.operand || call.output == DType::kFloat32),
                "operands must be bf16 or fp16, the output fp32 or of their type");
  FUSIBLE_CHECK(call.workspace, "groups of any shapes need a workspace");
}

RaggedParams make_params(const RaggedGemm& call) {
  const RaggedWorkspace workspace = lay_out_ragged(call.workspace, call.groups);
  const bool depth_first = call.layout == Layout::kNT;
  RaggedParams p{};
  p.a = model_map(workspace.maps, call.operand, 2, 64);
  p.b = model_map(workspace.maps, call.operand, 4, depth_first ? kTile.tile_n / 2 : tile_k(call.operand));
  p.out = model_map(workspace.maps, call.output, 4, 64);
  p.shape = {.sizes = {nullptr, static_cast<int>(call.groups), false, wrong_size_word(current_device())},
             .counter = workspace.counter};
  p.epilogue = {.bias = call.epilogue.bias.data,
                .bias_type = call.epilogue.bias.type,
                .columns = static_cast<int>(call.epilogue.bias.pitch),
                .bias_pitch = call.epilogue.bias.pitch,
                .alphas = call.epilogue.alphas,
                .alpha = call.epilogue.alpha};
  p.accumulate = call.accumulate;
  p.groups = workspace.groups, p.maps = workspace.maps, p.edges = workspace.edges;
  p.a_data = call.a.data, p.b_data = call.b.data, p.out_data = call.out;
  p.a_elements = call.a.elements, p.b_elements = call.b.elements;
  return p;
}

}  // namespace

int64_t ragged_workspace_bytes(int64_t groups) { return bytes_of_ragged_workspace(groups); }

void ragged_gemm(const RaggedGemm& call, int device, cudaStream_t stream) {
  check(call, device);
  if (call.out_elements == 0) return;
  const DeviceGuard guard(device);
  const int multiprocessors = device_properties(device).multiprocessors;
  const RaggedParams params = make_params(call);
  const RaggedSource source{.a = call.a,
                            .b = call.b,
                            .out_elements = call.out_elements,
                            .layout = call.layout,
                            .tile_m = kTile.tile_m,
                            .tile_n = kTile.tile_n,
                            .fp32_output = call.output == DType::kFloat32,
                            .skip_empty = call.accumulate && !call.epilogue.bias.data,
                            .zero_tail = call.zero_tail};
  const GemmProblem problem = problem_of(call);
  FUSIBLE_CUDA_CHECK(prepare_ragged(params, source, multiprocessors, stream), "shapes of ", problem);
  if (call.accumulate && (call.betas || call.beta != 1))
    FUSIBLE_CUDA_CHECK(scale_ragged(params, call.output, call.betas, call.beta, multiprocessors, stream), "beta of ",
                       problem);
  const GemmConfig config{.variant = kRaggedVariant,
                          .grid = static_cast<int>(std::min<int64_t>(multiprocessors, call.out_elements)),
                          .on_demand = true};
  const KernelEntry entry = dispatch_dtype_of_16_bits(call.operand, [&](auto operand) {
    return ragged_entry<decltype(operand)::value>(call.layout, source.fp32_output);
  });
  launch(params, entry, config, problem, device, stream);
}

}  // namespace fusible
