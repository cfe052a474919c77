#include "fusible/routed_mlp.h"

#include "fusible/device.h"

namespace fusible {
namespace {

constexpr int64_t kAlignment = 256;

// Where everything lies in the workspace. What the experts give overwrites what they were given.
struct Room {
  int32_t *sizes, *place, *counts;
  float* scales;
  char *rows, *pre, *hidden, *up, *down;  // the last two: workspaces of the products
  int64_t bytes;
};

Room room_of(const RoutedMlp& m, int64_t slots, char* memory) {
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    char* const here = memory + at;
    at += blocks_of(bytes, kAlignment) * kAlignment;
    return here;
  };
  const int64_t element = bytes_of(m.type), wide = m.activation.gated ? 2 * m.columns : m.columns;
  Room room{};
  room.sizes = reinterpret_cast<int32_t*>(take((m.groups + 1) * 4));
  room.place = reinterpret_cast<int32_t*>(take(slots * 4));
  room.counts = reinterpret_cast<int32_t*>(take(route_workspace_bytes(slots, m.groups)));
  room.scales = reinterpret_cast<float*>(take(slots * 4));
  room.rows = take(slots * m.features * element);
  room.hidden = take(slots * m.columns * element);
  room.pre = m.separate ? take(slots * wide * element) : nullptr;
  room.up = take(workspace_bytes(m.groups));
  room.down = take(workspace_bytes(m.groups));
  room.bytes = at;
  return room;
}

GroupedGemm product(const RoutedMlp& m, const Room& room, int64_t slots, int64_t n, int64_t k, const void* a,
                    const MatrixView& weight, const MatrixView& bias, void* out) {
  GroupedGemm gemm{};
  gemm.problem = {
      m.transposed ? Layout::kNN : Layout::kNT, m.type, m.type, bias.data != nullptr, m.groups, slots, 0, n, k};
  gemm.a = {a, m.type, k, 0};
  gemm.b = weight;
  gemm.out = {out, m.type, n, 0};
  gemm.sizes = {room.sizes, m.groups, false};
  gemm.affine.bias = bias;
  return gemm;
}

void up_and_activation(const RoutedMlp& m, const Room& room, const GroupedGemm& up, int device, cudaStream_t stream) {
  if (m.separate) {
    grouped_gemm(up, device, stream);
    activate({m.activation, m.type, up.problem.tokens, m.columns, room.pre, {}, room.hidden}, device, stream);
  } else {
    linear_activation({up, m.activation, {}, room.hidden}, device, stream);
  }
}

}  // namespace

int64_t routed_workspace_bytes(const RoutedMlp& m, int64_t slots) { return room_of(m, slots, nullptr).bytes; }

void routed_mlp(const RoutedMlp& m, const RoutedTokens& c, int device, cudaStream_t stream) {
  const int64_t slots = c.tokens * c.slots;
  const Room room = room_of(m, slots, static_cast<char*>(c.workspace));
  RoutedRows rows{m.type, c.tokens, m.features, c.slots,   room.place, room.sizes + m.groups,
                  c.x,    c.pitch,  room.rows,  m.features};
  route({c.ids, c.wide, slots, m.groups, c.weights, room.sizes, nullptr, room.place, room.scales, room.counts}, device,
        stream);
  spread_rows(rows, false, device, stream);
  GroupedGemm up = product(m, room, slots, m.activation.gated ? 2 * m.columns : m.columns, m.features, room.rows, m.up,
                           m.up_bias, room.pre);
  GroupedGemm down = product(m, room, slots, m.features, m.columns, room.hidden, m.down, m.down_bias, room.rows);
  up.workspace = room.up, down.workspace = room.down;
  down.problem.affine = true;
  down.affine.row_scale = room.scales;
  Clearing clearing;
  clear_before(up, clearing), clear_before(down, clearing);
  clear(clearing, device, stream);
  up_and_activation(m, room, up, device, stream);
  grouped_gemm(down, device, stream);
  rows.from = room.rows, rows.from_pitch = m.features, rows.to = c.out, rows.to_pitch = m.features;
  sum_rows(rows, device, stream);
}

}  // namespace fusible
