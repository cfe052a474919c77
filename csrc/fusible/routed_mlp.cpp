// SPDX-License-Identifier: Apache-2.0
#include "fusible/routed_mlp.h"

#include "fusible/device.h"

namespace fusible {
namespace {

constexpr int64_t kAlignment = 256;

// The layout of the workspace. The output of the experts overwrites their input.
struct WorkspaceLayout {
  int32_t *tokens_per_expert, *row_of_slot, *route_workspace;
  float* scales;
  char *rows, *preact, *postact, *up, *down;  // the last two: workspaces of the products
  int64_t bytes;
};

WorkspaceLayout lay_out_workspace(const RoutedMlp& m, int64_t slots, char* memory) {
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    char* const here = memory + at;
    at += blocks_of(bytes, kAlignment) * kAlignment;
    return here;
  };
  const int64_t element = bytes_of(m.type), preact_columns = m.activation.gated ? 2 * m.columns : m.columns;
  WorkspaceLayout layout{};
  layout.tokens_per_expert = reinterpret_cast<int32_t*>(take((m.groups + 1) * 4));
  layout.row_of_slot = reinterpret_cast<int32_t*>(take(slots * 4));
  layout.route_workspace = reinterpret_cast<int32_t*>(take(route_workspace_bytes(slots, m.groups)));
  layout.scales = reinterpret_cast<float*>(take(slots * 4));
  layout.rows = take(slots * m.features * element);
  layout.postact = take(slots * m.columns * element);
  layout.preact = m.unfused ? take(slots * preact_columns * element) : nullptr;
  layout.up = take(workspace_bytes(m.groups));
  layout.down = take(workspace_bytes(m.groups));
  layout.bytes = at;
  return layout;
}

GroupedGemm product(const RoutedMlp& m, const WorkspaceLayout& layout, int64_t slots, int64_t n, int64_t k,
                    const void* a, const MatrixView& weight, const MatrixView& bias, void* out) {
  GroupedGemm gemm{};
  gemm.problem = {
      m.transposed ? Layout::kNN : Layout::kNT, m.type, m.type, bias.data != nullptr, m.groups, slots, 0, n, k};
  gemm.a = {a, m.type, k, 0};
  gemm.b = weight;
  gemm.out = {out, m.type, n, 0};
  gemm.sizes = {layout.tokens_per_expert, m.groups, false};
  gemm.epilogue.bias = bias;
  return gemm;
}

void up_and_activation(const RoutedMlp& m, const WorkspaceLayout& layout, const GroupedGemm& up, int device,
                       cudaStream_t stream) {
  if (m.unfused) {
    grouped_gemm(up, device, stream);
    activate({m.activation, m.type, up.problem.tokens, m.columns, layout.preact, {}, layout.postact}, device, stream);
  } else {
    linear_activation({up, m.activation, {}, layout.postact}, device, stream);
  }
}

}  // namespace

int64_t routed_workspace_bytes(const RoutedMlp& m, int64_t slots) { return lay_out_workspace(m, slots, nullptr).bytes; }

void routed_mlp(const RoutedMlp& m, const RoutedTokens& c, int device, cudaStream_t stream) {
  const int64_t slots = c.tokens * c.top_k;
  const WorkspaceLayout layout = lay_out_workspace(m, slots, static_cast<char*>(c.workspace));
  RoutedRows rows{m.type, c.tokens, m.features,  c.top_k,   layout.row_of_slot, layout.tokens_per_expert + m.groups,
                  c.x,    c.pitch,  layout.rows, m.features};
  route({c.ids, c.int64_ids, slots, m.groups, c.weights, layout.tokens_per_expert, nullptr, layout.row_of_slot,
         layout.scales, layout.route_workspace},
        device, stream);
  permute(rows, false, device, stream);
  GroupedGemm up = product(m, layout, slots, m.activation.gated ? 2 * m.columns : m.columns, m.features, layout.rows,
                           m.up, m.up_bias, layout.preact);
  GroupedGemm down = product(m, layout, slots, m.features, m.columns, layout.postact, m.down, m.down_bias, layout.rows);
  up.workspace = layout.up, down.workspace = layout.down;
  down.problem.scale_bias = true;
  down.epilogue.row_scale = layout.scales;
  Zeroing zeroing;
  zero_before(up, zeroing), zero_before(down, zeroing);
  zero(zeroing, device, stream);
  up_and_activation(m, layout, up, device, stream);
  grouped_gemm(down, device, stream);
  rows.source = layout.rows, rows.source_pitch = m.features, rows.out = c.out, rows.out_pitch = m.features;
  unpermute(rows, device, stream);
}

}  // namespace fusible
