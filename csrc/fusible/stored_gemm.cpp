// SPDX-License-Identifier: Apache-2.0
#include "fusible/stored_gemm.h"

#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_launch.h"

namespace fusible {
namespace {

constexpr int kScaleValues = 32;
using PackedParams = WithPackedWeights<WithSecondPair<GemmParams>>;

// The weight as stored: its rows, and values in each.
struct StoredShape {
  int64_t rows, values;
  explicit StoredShape(const GemmProblem& p)
      : rows(p.layout == Layout::kNT ? p.n : p.k), values(p.layout == Layout::kNT ? p.k : p.n) {}
};

void check_call(const StoredGemm& call, int device) {
  const GemmProblem& p = call.gemm.problem;
  const int64_t values = StoredShape(p).values;
  FUSIBLE_CHECK(p.layout != Layout::kTN && p.operand == DType::kBFloat16 && p.output == p.operand,
                "rows and results are bf16. ", p);
  check_shapes(call.gemm, device);
  FUSIBLE_CHECK(values % (2 * kScaleValues) == 0, "rows of the weight are multiples of 64 values, got ", values, ". ",
                p);
  FUSIBLE_CHECK(call.gemm.b.addresses.empty() && call.gemm.b.pitch * 2 == values && call.scales &&
                    reinterpret_cast<uintptr_t>(call.scales) % 2 == 0,
                "weights and their scales are dense tensors. ", p);
  FUSIBLE_CHECK(!call.gemm.epilogue.alphas && call.gemm.epilogue.alpha == 1, "it has no factors of groups. ", p);
  FUSIBLE_CHECK(p.second_k <= kMostSecondDepth, "a second pair is at most ", kMostSecondDepth, " deep. ", p);
  FUSIBLE_CHECK(p.layout == Layout::kNT || !p.scale_bias, "only kNT has a bias or factors. ", p);
}

}  // namespace

void stored_gemm(const StoredGemm& call, int device, cudaStream_t stream) {
  const GroupedGemm gemm = as_strided(call.gemm);
  const GemmProblem& p = gemm.problem;
  check_call(call, device);
  if (p.tokens == 0) return;
  const DeviceGuard guard(device);
  const GemmConfig config = packed_config(p, device_properties(device).multiprocessors);
  const TileVariant& tile = config.tile();
  const StoredShape shape(p);
  PackedParams params{prepare_shape(gemm, config, stream)};
  params.a = token_rows_map(gemm.a, p.tokens, p.k, tile.token_box());
  params.b = packed_weight_map(gemm.b, p.groups, shape.rows, shape.values, p.layout == Layout::kNN);
  params.out = token_output_map(gemm.out, p.tokens, p.n, tile.smem_out_rows());
  params.second.a = p.second_k ? token_rows_map(gemm.second_a, p.tokens, p.second_k, tile.token_box()) : params.a;
  params.second.b = params.b;  // a stage has bytes of weights in any case; nothing reads those of the second pair
  params.second.k_blocks = params.k_blocks - (p.second_k ? 1 : 0);
  params.second.short_end = p.second_k <= 16;
  params.packed = {.scales = call.scales,
                   .rows = static_cast<int>(shape.rows),
                   .blocks = static_cast<int>(shape.values / kScaleValues),
                   .second = gemm.second_b.data,
                   .second_pitch = gemm.second_b.pitch,
                   .second_group = gemm.second_b.group_stride,
                   .second_k = static_cast<int>(p.second_k),
                   .columns = static_cast<int>(p.n)};
  const KernelEntry kernel = p.layout == Layout::kNT ? packed_entry<Layout::kNT>() : packed_entry<Layout::kNN>();
  launch(params, kernel, config, p, device, stream);
}

}  // namespace fusible
