// SPDX-License-Identifier: Apache-2.0
// The launches of quantisers, and of products of packed weights, as values (fusible/launches.h). Pitches and numbers of
// blocks that are not linear in the tokens are derived when a launch is made.
#pragma once
#include "fusible/launch_calls.h"
#include "fusible/packed_gemm.h"
#include "fusible/quantize.h"

namespace fusible {

template <class Visitor>
void visit_groups(Visitor& v, SplitSizes& sizes) {
  v.field("groups", sizes.groups), visit_sizes(v, sizes);
}
template <class Visitor>
void visit_copies(Visitor& v, QuantizedRows& rows, BlockedColumns& columns) {
  v.field("rows", rows.data), v.field("row_scales", rows.scales);
  v.field("columns", columns.data), v.field("column_scales", columns.scales);
}

template <class Visitor>
void visit_scaling(Visitor& v, Scaling& scaling, float*& amax, const float*& encode) {
  v.field("scaling", scaling), v.field("amax", amax), v.field("encode", encode);
}

struct QuantizeRowsLaunch : OnStream {
  static constexpr const char* kName = "quantize_rows";
  QuantizeRows call{};

  template <class Visitor>
  void fields(Visitor& v) {
    visit_stream(v, *this), v.field("type", call.type), v.rows("tokens", call.tokens);
    v.field("features", call.features), v.field("x", call.x), v.field("pitch", call.pitch), visit_groups(v, call.sizes);
    v.field("power_of_two", call.power_of_two), visit_copies(v, call.rows, call.columns);
    v.optional();
    v.field("slot_of_row", call.slot_of_row), v.field("top_k", call.top_k), v.field("tiles", call.tiles);
    visit_scaling(v, call.scaling, call.amax, call.encode);
  }
  void complete() {}
  void run() const { quantize_rows(call, device, stream); }
};

struct QuantizeWeightLaunch : OnStream {
  static constexpr const char* kName = "quantize_weight";
  QuantizeWeight call{};
  Addresses addresses;

  template <class Visitor>
  void fields(Visitor& v) {
    visit_stream(v, *this), v.field("type", call.type), v.field("groups", call.groups), v.field("n", call.n);
    v.field("k", call.k), v.field("weight", call.weight), v.field("pitch", call.pitch);
    v.field("group_stride", call.group_stride), v.field("addresses", addresses), v.field("halves", call.halves);
    v.field("power_of_two", call.power_of_two), v.field("data", call.data), v.field("transposed", call.transposed);
    v.field("scales", call.scales);
    v.field("scales_transposed", call.scales_transposed);
    v.optional();
    visit_scaling(v, call.scaling, call.amax, call.encode), v.field("transposed_scales", call.transposed_scales);
  }
  void complete() { call.addresses = addresses; }
  void run() const { quantize_weight(call, device, stream); }
};

struct PermuteScalesLaunch : OnStream {
  static constexpr const char* kName = "permute_scales";
  PermuteScales call{};

  template <class Visitor>
  void fields(Visitor& v) {
    visit_stream(v, *this), v.rows("tokens", call.tokens), v.field("top_k", call.top_k);
    v.field("features", call.features), v.field("slot_of_row", call.slot_of_row), v.field("num_rows", call.num_rows);
    v.field("source", call.source), v.field("out", call.out);
  }
  void complete() {}
  void run() const { permute_scales(call, device, stream); }
};

struct TransposeBytesLaunch : OnStream {
  static constexpr const char* kName = "transpose_bytes";
  TransposeBytes call{};

  template <class Visitor>
  void fields(Visitor& v) {
    visit_stream(v, *this), v.field("groups", call.groups), v.field("rows", call.rows);
    v.field("columns", call.columns), v.field("source", call.source), v.field("out", call.out);
  }
  void complete() {}
  void run() const { transpose_bytes(call, device, stream); }
};

struct QuantizeActivationLaunch : OnStream {
  static constexpr const char* kName = "quantize_activation";
  QuantizeActivation call{};
  Addresses vectors;

  template <class Visitor>
  void fields(Visitor& v) {
    v.field("activation", call.activation), visit_stream(v, *this), v.field("type", call.type);
    v.rows("tokens", call.tokens), v.field("features", call.features), v.field("preact", call.preact);
    visit_groups(v, call.sizes), v.field("power_of_two", call.power_of_two);
    visit_copies(v, call.rows, call.columns);
    v.optional();
    visit_scales(v, call.scales), v.field("tiles", call.tiles), v.field("vectors", vectors);
  }
  void complete() {}
  void run() const { quantize_activation(call, column_vectors(vectors), device, stream); }
};

struct QuantizeActivationBackwardLaunch : OnStream {
  static constexpr const char* kName = "quantize_activation_backward";
  QuantizeActivationBackward call{};
  Addresses vectors;
  DVectorFields dvectors;

  template <class Visitor>
  void fields(Visitor& v) {
    v.field("activation", call.activation), visit_stream(v, *this), v.field("type", call.type);
    v.rows("tokens", call.tokens), v.field("features", call.features), v.field("dpostact", call.dpostact);
    v.field("preact", call.preact), visit_groups(v, call.sizes), v.field("power_of_two", call.power_of_two);
    visit_copies(v, call.rows, call.columns);
    v.optional();
    v.field("postact_columns", call.postact_columns.data), v.field("postact_scales", call.postact_columns.scales);
    visit_scales(v, call.scales), v.field("dscales", call.dscales), v.field("workspace", call.workspace);
    v.field("tiles", call.tiles), v.field("vectors", vectors), dvectors.visit(v);
  }
  void complete() {}
  void run() const { quantize_activation_backward(call, column_vectors(vectors), dvectors.all(), device, stream); }
};

// The workspace of `amax`.
struct QuantizeWorkspace {
  static constexpr const char* kName = "quantize_workspace";
  Scaling scaling = Scaling::kBlocks;
  int64_t rows = 0, groups = 0, features = 0;

  template <class Visitor>
  void fields(Visitor& v) {
    v.field("scaling", scaling), v.rows("rows", rows), v.field("groups", groups), v.field("features", features);
  }
  int64_t bytes() const {
    return largest_magnitudes(scaling, rows, groups, features) * static_cast<int64_t>(sizeof(float));
  }
};

struct PackedGemmLaunch : OnStream {
  static constexpr const char* kName = "packed_gemm";
  PackedGemm call{};

  template <class Visitor>
  void fields(Visitor& v) {
    visit_stream(v, *this), v.field("format", call.format), v.rows("tokens", call.tokens), v.field("n", call.n);
    v.field("k", call.k), v.field("a", call.a), v.field("a_pitch", call.a_pitch), v.field("b", call.b);
    v.field("b_scales", call.b_scales), visit_groups(v, call.sizes), v.field("output", call.output);
    v.field("out", call.out), v.field("out_pitch", call.out_pitch);
    v.optional();
    v.field("bias", call.bias), v.field("bias_type", call.bias_type), v.field("bias_scale", call.bias_scale);
    v.field("row_scale", call.row_scale), v.field("alphas", call.alphas), v.field("zero_tail", call.zero_tail);
  }
  void complete() {}
  void run() const { packed_gemm(call, device, stream); }
};

struct QuantizeBackwardWorkspace {
  static constexpr const char* kName = "quantize_backward_workspace";
  int64_t tokens = 0, features = 0, groups = 0, dvectors = 0;

  template <class Visitor>
  void fields(Visitor& v) {
    v.rows("tokens", tokens), v.field("features", features);
    v.optional();
    v.field("groups", groups), v.field("dvectors", dvectors);
  }
  int64_t bytes() const { return quantize_backward_workspace(tokens, features, groups, dvectors); }
};

}  // namespace fusible
