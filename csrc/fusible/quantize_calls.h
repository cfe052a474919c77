// SPDX-License-Identifier: Apache-2.0
// The launches of quantisers and decoders, and of products of packed weights, as values (fusible/launches.h). Pitches
// and numbers of blocks that are not linear in the tokens are derived when a launch is made.
#pragma once
#include "fusible/decode_weight.h"
#include "fusible/launch_calls.h"
#include "fusible/packed_gemm.h"
#include "fusible/quantize.h"

namespace fusible {

inline void visit_groups(Fields& v, SplitSizes& sizes) { v.field("groups", sizes.groups), visit_sizes(v, sizes); }
inline void visit_copies(Fields& v, QuantizedRows& rows, BlockedColumns& columns) {
  v.field("rows", rows.data), v.field("row_scales", rows.scales), v.field("columns", columns.data);
  v.field("column_scales", columns.scales);
}

inline void visit_scaling(Fields& v, Scaling& scaling, float*& amax, const float*& encode) {
  FUSIBLE_FIELDS(v, scaling, amax, encode);
}

struct QuantizeRowsLaunch : LaunchOf<QuantizeRows, quantize_rows> {
  static constexpr const char* kName = "quantize_rows";

  void fields(Fields& v) {
    visit_stream(v, *this), v.field("type", call.type), v.rows("tokens", call.tokens);
    FUSIBLE_FIELDS(v, call.features, call.x, call.pitch), visit_groups(v, call.sizes);
    v.field("power_of_two", call.power_of_two), visit_copies(v, call.rows, call.columns);
    v.optional();
    FUSIBLE_FIELDS(v, call.exponents, call.slot_of_row, call.top_k);
    visit_scaling(v, call.scaling, call.amax, call.encode);
  }
};

struct QuantizeWeightLaunch : LaunchOf<QuantizeWeight, quantize_weight> {
  static constexpr const char* kName = "quantize_weight";
  Addresses addresses;

  void fields(Fields& v) {
    visit_stream(v, *this);
    FUSIBLE_FIELDS(v, call.type, call.groups, call.n, call.k, call.weight, call.pitch, call.group_stride, addresses,
                   call.halves, call.power_of_two, call.data, call.transposed, call.scales, call.scales_transposed);
    v.optional();
    visit_scaling(v, call.scaling, call.amax, call.encode), v.field("transposed_scales", call.transposed_scales);
  }
  void complete() { call.addresses = addresses; }
};

struct TransposeBytesLaunch : LaunchOf<TransposeBytes, transpose_bytes> {
  static constexpr const char* kName = "transpose_bytes";

  void fields(Fields& v) {
    visit_stream(v, *this), FUSIBLE_FIELDS(v, call.groups, call.rows, call.columns, call.source, call.out);
  }
};

struct DecodeWeightLaunch : LaunchOf<DecodeWeight, decode_weight> {
  static constexpr const char* kName = "decode_weight";

  void fields(Fields& v) {
    visit_stream(v, *this);
    FUSIBLE_FIELDS(v, call.groups, call.n, call.k, call.codes, call.data, call.stored_scale, call.scales,
                   call.rows_of_scale, call.columns_of_scale, call.decoders, call.decoders_of_group, call.divides,
                   call.type, call.out);
  }
};

struct QuantizeActivationLaunch : OnStream {
  static constexpr const char* kName = "quantize_activation";
  QuantizeActivation call{};
  Addresses vectors;

  void fields(Fields& v) {
    v.field("activation", call.activation), visit_stream(v, *this), v.field("type", call.type);
    v.rows("tokens", call.tokens), FUSIBLE_FIELDS(v, call.features, call.preact), visit_groups(v, call.sizes);
    v.field("power_of_two", call.power_of_two), visit_copies(v, call.rows, call.columns);
    v.optional();
    visit_scales(v, call.scales), v.field("vectors", vectors);
  }
  void run() const { quantize_activation(call, column_vectors(vectors), device, stream); }
};

struct QuantizeActivationBackwardLaunch : OnStream {
  static constexpr const char* kName = "quantize_activation_backward";
  QuantizeActivationBackward call{};
  Addresses vectors;
  DVectorFields dvectors;

  void fields(Fields& v) {
    v.field("activation", call.activation), visit_stream(v, *this), v.field("type", call.type);
    v.rows("tokens", call.tokens), FUSIBLE_FIELDS(v, call.features, call.dpostact, call.preact);
    visit_groups(v, call.sizes), v.field("power_of_two", call.power_of_two), visit_copies(v, call.rows, call.columns);
    v.optional();
    v.field("postact_columns", call.postact_columns.data), v.field("postact_scales", call.postact_columns.scales);
    visit_scales(v, call.scales), FUSIBLE_FIELDS(v, call.dscales, call.workspace, vectors), dvectors.visit(v);
  }
  void run() const { quantize_activation_backward(call, column_vectors(vectors), dvectors.all(), device, stream); }
};

// The workspace of `amax`.
struct QuantizeWorkspace {
  static constexpr const char* kName = "quantize_workspace";
  Scaling scaling = Scaling::kBlocks;
  int64_t rows = 0, groups = 0, features = 0;

  void fields(Fields& v) { v.field("scaling", scaling), v.rows("rows", rows), FUSIBLE_FIELDS(v, groups, features); }
  int64_t bytes() const {
    return largest_magnitudes(scaling, rows, groups, features) * static_cast<int64_t>(sizeof(float));
  }
};

struct PackedGemmLaunch : LaunchOf<PackedGemm, packed_gemm> {
  static constexpr const char* kName = "packed_gemm";

  void fields(Fields& v) {
    visit_stream(v, *this), v.field("format", call.format), v.rows("tokens", call.tokens);
    FUSIBLE_FIELDS(v, call.n, call.k, call.a, call.a_pitch, call.b, call.b_scales), visit_groups(v, call.sizes);
    FUSIBLE_FIELDS(v, call.output, call.out, call.out_pitch);
    v.optional();
    FUSIBLE_FIELDS(v, call.bias, call.bias_type, call.bias_scale, call.row_scale, call.alphas, call.zero_tail);
  }
};

struct QuantizeBackwardWorkspace {
  static constexpr const char* kName = "quantize_backward_workspace";
  int64_t tokens = 0, features = 0, groups = 0, dvectors = 0;

  void fields(Fields& v) {
    v.rows("tokens", tokens), v.field("features", features);
    v.optional();
    FUSIBLE_FIELDS(v, groups, dvectors);
  }
  int64_t bytes() const { return quantize_backward_workspace(tokens, features, groups, dvectors); }
};

}  // namespace fusible
