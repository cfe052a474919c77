#include "fusible/routed_mlp.h"

#include "fusible/device.h"

namespace fusible {
namespace {

constexpr int64_t kAlignment = 256;

// Where everything lies in the workspace. What the experts give overwrites what they were given.
struct WorkspaceLayout {
  int32_t *sizes, *place, *counts;
  float* scales;
  char *rows, *pre, *hidden, *up, *down;  // the last two: workspaces of the products
  int64_t bytes;
};

WorkspaceLayout lay_out_workspace(const RoutedMlp& m, int64_t slots, char* memory) {
  int64_t at = 0, total = 0;
  const auto take = [&](int64_t bytes) {
    char* const here = memory + at;
    at += blocks_of(bytes, kAlignment) * kAlignment;
    total += bytes + kAlignment;  // never less than `at`, and affine in the slots, as replays assume of all sizes
    return here;
  };
  const int64_t element = bytes_of(m.type), pre_columns = m.activation.gated ? 2 * m.columns : m.columns;
  WorkspaceLayout layout{};
  layout.sizes = reinterpret_cast<int32_t*>(take((m.groups + 1) * 4));
  layout.place = reinterpret_cast<int32_t*>(take(slots * 4));
  layout.counts = reinterpret_cast<int32_t*>(take(route_workspace_bytes(slots, m.groups)));
  layout.scales = reinterpret_cast<float*>(take(slots * 4));
  layout.rows = take(slots * m.features * element);
  layout.hidden = take(slots * m.columns * element);
  layout.pre = m.separate ? take(slots * pre_columns * element) : nullptr;
  layout.up = take(workspace_bytes(m.groups));
  layout.down = take(workspace_bytes(m.groups));
  layout.bytes = total;
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
  gemm.sizes = {layout.sizes, m.groups, false};
  gemm.epilogue.bias = bias;
  return gemm;
}

void up_and_activation(const RoutedMlp& m, const WorkspaceLayout& layout, const GroupedGemm& up, int device,
                       cudaStream_t stream) {
  if (m.separate) {
    grouped_gemm(up, device, stream);
    activate({m.activation, m.type, up.problem.tokens, m.columns, layout.pre, {}, layout.hidden}, device, stream);
  } else {
    linear_activation({up, m.activation, {}, layout.hidden}, device, stream);
  }
}

}  // namespace

int64_t routed_workspace_bytes(const RoutedMlp& m, int64_t slots) { return lay_out_workspace(m, slots, nullptr).bytes; }

void routed_mlp(const RoutedMlp& m, const RoutedTokens& c, int device, cudaStream_t stream) {
  const int64_t slots = c.tokens * c.slots;
  const WorkspaceLayout layout = lay_out_workspace(m, slots, static_cast<char*>(c.workspace));
  RoutedRows rows{m.type, c.tokens, m.features,  c.slots,   layout.place, layout.sizes + m.groups,
                  c.x,    c.pitch,  layout.rows, m.features};
  route({c.ids, c.int64_ids, slots, m.groups, c.weights, layout.sizes, nullptr, layout.place, layout.scales,
         layout.counts},
        device, stream);
  spread_rows(rows, false, device, stream);
  GroupedGemm up = product(m, layout, slots, m.activation.gated ? 2 * m.columns : m.columns, m.features, layout.rows,
                           m.up, m.up_bias, layout.pre);
  GroupedGemm down = product(m, layout, slots, m.features, m.columns, layout.hidden, m.down, m.down_bias, layout.rows);
  up.workspace = layout.up, down.workspace = layout.down;
  down.problem.scale_bias = true;
  down.epilogue.row_scale = layout.scales;
  Zeroing zeroing;
  zero_before(up, zeroing), zero_before(down, zeroing);
  zero(zeroing, device, stream);
  up_and_activation(m, layout, up, device, stream);
  grouped_gemm(down, device, stream);
  rows.from = layout.rows, rows.from_pitch = m.features, rows.to = c.out, rows.to_pitch = m.features;
  sum_rows(rows, device, stream);
}

}  // namespace fusible
