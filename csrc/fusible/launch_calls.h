// SPDX-License-Identifier: Apache-2.0
// Every launch of the extension as a value, with the names of its fields. 0 for an address that is not wanted.
#pragma once
#include <string>

#include "fusible/activation.h"
#include "fusible/choice.h"
#include "fusible/foreign_kernel.h"
#include "fusible/fused_gemm.h"
#include "fusible/group_rows.h"
#include "fusible/grouped_gemm.h"
#include "fusible/launches.h"
#include "fusible/low_rank.h"
#include "fusible/pointwise.h"
#include "fusible/ragged_gemm.h"
#include "fusible/routed_mlp.h"
#include "fusible/routing.h"
#include "fusible/scaled_gemm.h"
#include "fusible/stored_gemm.h"
#include "fusible/wrong_sizes.h"
#include "fusible/zeroing.h"

namespace fusible {

inline void visit_stream(Fields& v, OnStream& launch) { FUSIBLE_FIELDS(v, launch.device, launch.stream); }

inline void visit_sizes(Fields& v, SplitSizes& sizes) { FUSIBLE_FIELDS(v, sizes.sizes, sizes.int64_sizes); }

// The pointers of a user's function.
template <class T, size_t kMost>
void put(const Addresses& from, T* (&to)[kMost]) {
  FUSIBLE_CHECK(from.size() <= kMost, "takes at most ", kMost, " numbers of a row, of a column and of an element, got ",
                from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = reinterpret_cast<T*>(from[i]);
}

inline ColumnVectors column_vectors(const Addresses& addresses) {
  ColumnVectors vectors{.count = static_cast<int>(addresses.size())};
  put(addresses, vectors.data);
  return vectors;
}

// The destinations of the gradients of column numbers; empty if they are not wanted.
struct DVectorFields {
  Addresses dvectors;
  Numbers types, of_both, of_all_rows;  // one for each of the dvectors

  void visit(Fields& v) {
    v.field("dvectors", dvectors), v.field("dvector_types", types), v.field("dvectors_of_both", of_both);
    v.field("dvectors_of_all_rows", of_all_rows);
  }
  std::vector<DVector> all() const {
    for (const Numbers* each : {&types, &of_both, &of_all_rows})
      FUSIBLE_CHECK(each->size() == dvectors.size(), "each of the dvectors has a type, a layout and its rows");
    std::vector<DVector> all;
    for (size_t i = 0; i < dvectors.size(); ++i)
      all.push_back(
          {reinterpret_cast<void*>(dvectors[i]), static_cast<DType>(types[i]), of_both[i] != 0, of_all_rows[i] != 0});
    return all;
  }
};

inline void visit_scales(Fields& v, RowScale& scales) {
  v.field("scales", scales.data), v.field("scales_type", scales.type);
}

// The common part of all grouped GEMMs of tokens.
struct ProductLaunch : OnStream {
  GroupedGemm gemm{};
  Addresses out_addresses, bias_addresses;

  void visit_bias(Fields& v) {
    MatrixView& bias = gemm.epilogue.bias;
    v.field("bias", bias.data), v.field("bias_type", bias.type), v.field("bias_pitch", bias.pitch);
    FUSIBLE_FIELDS(v, bias_addresses, gemm.epilogue.bias_scale);
  }
  void complete() {
    const GemmProblem& p = gemm.problem;
    gemm.a.type = gemm.b.type = gemm.second_a.type = gemm.second_b.type = p.operand, gemm.out.type = p.output;
    gemm.sizes.groups = static_cast<int>(p.groups);
    gemm.out.addresses = out_addresses, gemm.epilogue.bias.addresses = bias_addresses;
    gemm.problem.scale_bias = gemm.epilogue.bias.data || !bias_addresses.empty();
    gemm.zeroed = false;
  }
  void zero_before(Zeroing& zeroing) { fusible::zero_before(gemm, zeroing); }
};

// A grouped GEMM of 16-bit operands; `bias` and what follows it in the epilogue are the call's own.
struct GemmLaunch : ProductLaunch {
  Addresses b_addresses;

  void visit_product(Fields& v) {
    GemmProblem& p = gemm.problem;
    FUSIBLE_FIELDS(v, p.layout, p.operand), visit_stream(v, *this), v.field("groups", p.groups);
    v.rows("tokens", p.tokens), FUSIBLE_FIELDS(v, p.n, p.k), v.field("a", gemm.a.data);
    v.field("a_pitch", gemm.a.pitch), v.field("b", gemm.b.data), v.field("b_pitch", gemm.b.pitch);
    v.field("b_group", gemm.b.group_stride), v.field("b_addresses", b_addresses), visit_sizes(v, gemm.sizes);
  }
  void visit_schedule(Fields& v) { FUSIBLE_FIELDS(v, gemm.workspace, gemm.variant); }
  void visit_second_pair(Fields& v) {
    MatrixView &a = gemm.second_a, &b = gemm.second_b;
    v.field("second_k", gemm.problem.second_k), v.field("second_a", a.data), v.field("second_a_pitch", a.pitch);
    v.field("second_b", b.data), v.field("second_b_pitch", b.pitch), v.field("second_b_group", b.group_stride);
  }
  void complete() {
    ProductLaunch::complete();
    gemm.b.addresses = b_addresses;
  }
};

struct GroupedGemmLaunch : GemmLaunch {
  static constexpr const char* kName = "grouped_gemm";
  Addresses followers;

  void fields(Fields& v) {
    EpilogueArguments& e = gemm.epilogue;
    visit_product(v), FUSIBLE_FIELDS(v, gemm.problem.output, gemm.problem.m), v.field("out", gemm.out.data);
    v.field("out_pitch", gemm.out.pitch), v.field("out_group", gemm.out.group_stride);
    FUSIBLE_FIELDS(v, out_addresses, gemm.accumulate);
    v.optional();
    visit_bias(v), FUSIBLE_FIELDS(v, e.row_scale, e.alphas, e.alpha, gemm.betas, gemm.beta), visit_schedule(v);
    FUSIBLE_FIELDS(v, gemm.workspace_bytes, gemm.zero_tail), visit_second_pair(v);
    FUSIBLE_FIELDS(v, followers, gemm.follows), v.field("first_group", gemm.run.first);
    v.field("run_groups", gemm.run.count);
  }
  void complete() {
    const EpilogueArguments& e = gemm.epilogue;
    GemmLaunch::complete();
    gemm.followers = followers;
    gemm.problem.scale_bias |= e.row_scale || e.bias_scale || e.alphas || e.alpha != 1;
  }
  void run() const { grouped_gemm(gemm, device, stream); }
};

struct StoredGemmLaunch : GemmLaunch {
  static constexpr const char* kName = "stored_gemm";
  const uint8_t* b_scales = nullptr;

  void fields(Fields& v) {
    visit_product(v), FUSIBLE_FIELDS(v, b_scales), v.field("out", gemm.out.data), v.field("out_pitch", gemm.out.pitch);
    FUSIBLE_FIELDS(v, gemm.workspace);
    v.optional();
    visit_bias(v), FUSIBLE_FIELDS(v, gemm.epilogue.row_scale, gemm.zero_tail), visit_second_pair(v);
  }
  void complete() {
    const EpilogueArguments& e = gemm.epilogue;
    gemm.problem.output = gemm.problem.operand;
    GemmLaunch::complete();
    gemm.b.type = DType::kE4M3;  // of a byte
    gemm.problem.scale_bias |= e.row_scale || e.bias_scale;
  }
  void run() const { stored_gemm({gemm, b_scales}, device, stream); }
};

// The common fields of products of e4m3 operands.
struct ScaledLaunch : ProductLaunch {
  const float *a_scales = nullptr, *b_scales = nullptr;

  void visit_operands(Fields& v) {
    GemmProblem& p = gemm.problem;
    visit_stream(v, *this), v.field("groups", p.groups), v.rows("tokens", p.tokens), v.field("n", p.n);
    v.field("a", gemm.a.data), v.field("a_scales", a_scales), v.field("b", gemm.b.data), v.field("b_scales", b_scales);
    visit_sizes(v, gemm.sizes), v.field("output", p.output), v.field("out", gemm.out.data);
    v.field("out_pitch", gemm.out.pitch), FUSIBLE_FIELDS(v, gemm.workspace, gemm.variant);
  }
  // Visits the operands of products of rows.
  void visit_row_operands(Fields& v) {
    visit_operands(v), v.field("k", gemm.problem.k), v.field("a_pitch", gemm.a.pitch);
    v.field("b_pitch", gemm.b.pitch), v.field("b_group", gemm.b.group_stride);
  }
  void visit_factors(Fields& v) {
    EpilogueArguments& e = gemm.epilogue;
    FUSIBLE_FIELDS(v, e.row_scale, e.alphas, gemm.zero_tail);
  }
  void complete(Layout layout) {
    gemm.problem.layout = layout, gemm.problem.operand = DType::kE4M3;
    ProductLaunch::complete();
  }
};

// The fields of products whose rows are tokens.
struct ScaledRowsLaunch : ScaledLaunch {
  int64_t b_scales_group = 0, b_scales_row = 0, b_scales_column = 0;
  bool halves = false;

  void visit_rows(Fields& v) {
    visit_row_operands(v), FUSIBLE_FIELDS(v, b_scales_group, b_scales_row, b_scales_column, halves);
  }
  void complete() {
    const EpilogueArguments& e = gemm.epilogue;
    ScaledLaunch::complete(Layout::kNT);
    gemm.problem.scale_bias |= e.row_scale || e.bias_scale || e.alphas;
  }
  ScaledGemm product() const {
    return {gemm, a_scales, b_scales, b_scales_group, b_scales_row, b_scales_column, halves};
  }
};

struct ScaledGemmLaunch : ScaledRowsLaunch {
  static constexpr const char* kName = "scaled_gemm";

  void fields(Fields& v) {
    visit_rows(v);
    v.optional();
    visit_bias(v), visit_factors(v);
  }
  void run() const { scaled_gemm(product(), device, stream); }
};

// With `out` 0, the product is not stored.
struct ScaledActivationLaunch : ScaledRowsLaunch {
  static constexpr const char* kName = "scaled_activation";
  Activation activation{};
  RowScale scales{};
  bool power_of_two = false;
  QuantizedRows rows{};
  Addresses vectors;

  void fields(Fields& v) {
    v.field("activation", activation), visit_rows(v), v.field("power_of_two", power_of_two);
    v.field("rows", rows.data), v.field("row_scales", rows.scales);
    v.optional();
    visit_bias(v), visit_scales(v, scales), FUSIBLE_FIELDS(v, gemm.zero_tail, vectors);
  }
  void run() const {
    scaled_activation({product(), activation, scales, power_of_two, rows, column_vectors(vectors)}, device, stream);
  }
};

struct RowScaledGemmLaunch : ScaledLaunch {
  static constexpr const char* kName = "row_scaled_gemm";
  int64_t b_scales_group = 0, b_scales_row = 0;
  bool fast = false;

  void fields(Fields& v) {
    visit_row_operands(v), FUSIBLE_FIELDS(v, b_scales_group, b_scales_row, fast);
    v.optional();
    visit_bias(v), visit_factors(v);
  }
  void complete() {
    ScaledLaunch::complete(Layout::kNT);
    gemm.problem.scale_bias = true;
  }
  void run() const { row_scaled_gemm({gemm, a_scales, b_scales, b_scales_group, b_scales_row, fast}, device, stream); }
};

struct ScaledWgradLaunch : ScaledLaunch {
  static constexpr const char* kName = "scaled_wgrad";

  void fields(Fields& v) {
    visit_operands(v), v.field("m", gemm.problem.m), v.field("out_group", gemm.out.group_stride);
    FUSIBLE_FIELDS(v, out_addresses, gemm.accumulate);
  }
  void complete() {
    ScaledLaunch::complete(Layout::kTN);
    gemm.a.pitch = gemm.b.pitch = kScaleBlock;
  }
  void run() const { scaled_wgrad({gemm, a_scales, b_scales}, device, stream); }
};

// With `preact` 0, the product is not stored.
struct LinearActivationLaunch : GemmLaunch {
  static constexpr const char* kName = "linear_activation";
  Activation activation{};
  RowScale scales{};
  const void* preact = nullptr;
  void* postact = nullptr;
  Addresses vectors;
  Arrivals arrivals{};

  void fields(Fields& v) {
    v.field("activation", activation), visit_product(v), FUSIBLE_FIELDS(v, preact, postact);
    v.optional();
    visit_bias(v), visit_scales(v, scales), v.field("vectors", vectors), visit_schedule(v), visit_second_pair(v);
    v.field("arrived", arrivals.blocks), v.field("pieces", arrivals.pieces);
  }
  void complete() {
    gemm.problem.output = gemm.problem.operand;
    gemm.out = {preact, gemm.problem.operand, gemm.problem.n, 0};
    GemmLaunch::complete();
  }
  void run() const {
    linear_activation({gemm, activation, scales, postact, column_vectors(vectors), arrivals}, device, stream);
  }
};

struct LinearActivationBackwardLaunch : GemmLaunch {
  static constexpr const char* kName = "linear_activation_backward";
  Activation activation{};
  RowScale scales{};
  const void* preact = nullptr;
  void *dpreact = nullptr, *dscales = nullptr, *postact = nullptr, *dbias = nullptr;
  DType dbias_type = DType::kFloat32;
  Addresses vectors;
  DVectorFields dvectors;

  void fields(Fields& v) {
    v.field("activation", activation), visit_product(v), FUSIBLE_FIELDS(v, preact, dpreact);
    v.optional();
    visit_scales(v, scales), FUSIBLE_FIELDS(v, dscales, postact, dbias, dbias_type, vectors), dvectors.visit(v);
    visit_schedule(v), visit_second_pair(v);
  }
  void complete() {
    gemm.problem.output = gemm.problem.operand;
    GemmLaunch::complete();
  }
  void run() const {
    linear_activation_backward({gemm, activation, scales, preact, dpreact, dscales, postact, dbias, dbias_type,
                                column_vectors(vectors), dvectors.all()},
                               device, stream);
  }
};

struct BackwardWorkspace {
  static constexpr const char* kName = "backward_workspace_bytes";
  int64_t groups = 0, tokens = 0, columns = 0;
  bool dscales = false;
  int64_t bias_columns = 0, dvectors = 0;

  void fields(Fields& v) {
    v.field("groups", groups), v.rows("tokens", tokens), FUSIBLE_FIELDS(v, columns, dscales, bias_columns, dvectors);
  }
  int64_t bytes() const { return backward_workspace_bytes(groups, tokens, columns, dscales, bias_columns, dvectors); }
};

struct RaggedGemmLaunch : LaunchOf<RaggedGemm, ragged_gemm> {
  static constexpr const char* kName = "ragged_gemm";

  void fields(Fields& v) {
    MatrixView& bias = call.epilogue.bias;
    FUSIBLE_FIELDS(v, call.layout, call.operand, call.output), visit_stream(v, *this), v.field("groups", call.groups);
    visit_packed(v, kOfA, call.a), visit_packed(v, kOfB, call.b), v.field("out", call.out);
    v.rows("out_elements", call.out_elements), FUSIBLE_FIELDS(v, call.zero_tail, call.accumulate);
    v.field("bias", bias.data), v.field("bias_type", bias.type), v.field("bias_pitch", bias.pitch);
    FUSIBLE_FIELDS(v, call.epilogue.alphas, call.epilogue.alpha, call.betas, call.beta, call.workspace);
  }
  void complete() {
    for (PackedMatrices* packed : {&call.a, &call.b})
      packed->rows.sizes.groups = packed->columns.sizes.groups = static_cast<int>(call.groups);
  }

 private:
  // Data, elements, then for rows and columns: dims on the device (0: the number for all groups), whether they are
  // int64, the number.
  using Names = const char* [8];
  static constexpr Names kOfA = {"a",         "a_elements",      "a_rows",           "a_rows_int64", "a_rows_uniform",
                                 "a_columns", "a_columns_int64", "a_columns_uniform"};
  static constexpr Names kOfB = {"b",         "b_elements",      "b_rows",           "b_rows_int64", "b_rows_uniform",
                                 "b_columns", "b_columns_int64", "b_columns_uniform"};
  static void visit_packed(Fields& v, const Names& names, PackedMatrices& m) {
    v.field(names[0], m.data), v.rows(names[1], m.elements);
    v.field(names[2], m.rows.sizes.sizes), v.field(names[3], m.rows.sizes.int64_sizes),
        v.rows(names[4], m.rows.uniform);
    v.field(names[5], m.columns.sizes.sizes), v.field(names[6], m.columns.sizes.int64_sizes);
    v.rows(names[7], m.columns.uniform);
  }
};

struct ActivateLaunch : LaunchOf<ActivationForward, activate> {
  static constexpr const char* kName = "activate";

  void fields(Fields& v) {
    v.field("activation", call.activation), visit_stream(v, *this), v.field("type", call.type);
    v.rows("rows", call.rows), FUSIBLE_FIELDS(v, call.columns, call.preact, call.postact);
    v.optional();
    visit_scales(v, call.scales);
  }
};

struct ActivateBackwardLaunch : LaunchOf<ActivationBackward, activate_backward> {
  static constexpr const char* kName = "activate_backward";

  void fields(Fields& v) {
    v.field("activation", call.activation), visit_stream(v, *this), v.field("type", call.type);
    v.rows("rows", call.rows), FUSIBLE_FIELDS(v, call.columns, call.dpostact, call.preact);
    v.optional();
    visit_scales(v, call.scales), FUSIBLE_FIELDS(v, call.dpreact, call.dscales, call.postact);
  }
};

struct PointwiseLaunch : LaunchOf<Pointwise, pointwise> {
  static constexpr const char* kName = "pointwise";
  Addresses numbers, dnumbers, vectors, dcolumns, matrices, dmatrices;

  void fields(Fields& v) {
    PointwiseParams& p = call.params;
    v.field("function", call.function), visit_stream(v, *this), v.rows("rows", p.rows);
    FUSIBLE_FIELDS(v, p.columns, p.block, p.x, p.dy, p.y, p.dx, numbers, dnumbers, vectors, dcolumns, matrices,
                   dmatrices, p.sizes.groups);
    visit_sizes(v, p.sizes), v.field("constants", call.constants);
  }
  void complete() {
    put(numbers, call.params.numbers), put(dnumbers, call.params.dnumbers);
    put(vectors, call.params.vectors), put(dcolumns, call.params.dcolumns);
    put(matrices, call.params.matrices), put(dmatrices, call.params.dmatrices);
  }
};

// Parameters: see ForeignKernel.
struct ForeignLaunch : LaunchOf<ForeignKernel, launch_foreign> {
  static constexpr const char* kName = "launch_foreign";

  void fields(Fields& v) {
    visit_stream(v, *this), FUSIBLE_FIELDS(v, call.function, call.blocks_x, call.blocks_y, call.threads);
    FUSIBLE_FIELDS(v, call.shared_bytes, call.parameters, call.numbers, call.maps, call.addresses);
  }
};

struct ZeroTailLaunch : OnStream {
  static constexpr const char* kName = "zero_tail";
  BufferRows rows{};
  SplitSizes sizes{};

  void fields(Fields& v) {
    visit_stream(v, *this), v.field("data", rows.data), v.rows("tokens", rows.tokens);
    FUSIBLE_FIELDS(v, rows.row_bytes, rows.pitch_bytes, sizes.groups), visit_sizes(v, sizes);
  }
  void run() const {
    SplitSizes reporting = sizes;
    reporting.wrong = wrong_size_word(device);
    zero({{}, {{rows, reporting}}}, device, stream);
  }
};

inline void visit_rows(Fields& v, DenseRows& rows, SplitSizes& sizes) {
  v.field("rows", rows.data), v.field("type", rows.type), v.rows("tokens", rows.tokens);
  FUSIBLE_FIELDS(v, rows.columns, rows.pitch, sizes.groups), visit_sizes(v, sizes);
}

struct ColumnSumsLaunch : LaunchOf<ColumnSums, column_sums> {
  static constexpr const char* kName = "column_sums";

  void fields(Fields& v) {
    visit_stream(v, *this), visit_rows(v, call.rows, call.sizes);
    FUSIBLE_FIELDS(v, call.scale, call.out, call.out_type, call.workspace);
  }
};

struct ColumnSumsWorkspace {
  static constexpr const char* kName = "column_sums_workspace";
  int64_t tokens = 0, columns = 0;
  int groups = 0;

  void fields(Fields& v) { v.rows("tokens", tokens), FUSIBLE_FIELDS(v, columns, groups); }
  int64_t bytes() const { return column_sums_workspace(tokens, columns, groups); }
};

struct RowDotsLaunch : LaunchOf<RowDots, row_dots> {
  static constexpr const char* kName = "row_dots";

  void fields(Fields& v) {
    visit_stream(v, *this), visit_rows(v, call.rows, call.sizes);
    FUSIBLE_FIELDS(v, call.vectors, call.vectors_type, call.out);
  }
};

struct LowRankPassLaunch : LaunchOf<LowRankPass, low_rank_pass> {
  static constexpr const char* kName = "low_rank_pass";

  void fields(Fields& v) {
    visit_stream(v, *this), visit_rows(v, call.rows, call.sizes);
    FUSIBLE_FIELDS(v, call.rank, call.by_columns, call.slot_of_row, call.top_k, call.gathered, call.factor,
                   call.product, call.low, call.gradient, call.gradient_type, call.workspace);
  }
};

struct LowRankWorkspace {
  static constexpr const char* kName = "low_rank_workspace";
  int64_t tokens = 0, columns = 0, rank = 0;
  bool gradient = false;
  int device = 0;

  void fields(Fields& v) { v.rows("tokens", tokens), FUSIBLE_FIELDS(v, columns, rank, gradient, device); }
  int64_t bytes() const { return low_rank_workspace(tokens, columns, rank, gradient, device); }
};

inline void visit_choice(Fields& v, ChoiceRule& rule) {
  FUSIBLE_FIELDS(v, rule.logits, rule.type), v.rows("tokens", rule.tokens);
  FUSIBLE_FIELDS(v, rule.experts, rule.top_k, rule.scores, rule.normalize, rule.scale);
}

struct ChooseLaunch : LaunchOf<Choice, choose> {
  static constexpr const char* kName = "choose";

  void fields(Fields& v) {
    visit_stream(v, *this), visit_choice(v, call.rule);
    FUSIBLE_FIELDS(v, call.groups, call.keep, call.best, call.bias, call.valid, call.given, call.ids, call.weights,
                   call.counts, call.slots, call.sums, call.squares, call.workspace);
  }
};

struct ChoiceWorkspace {
  static constexpr const char* kName = "choose_workspace";
  int64_t tokens = 0;
  int experts = 0;
  bool tallied = false;

  void fields(Fields& v) { v.rows("tokens", tokens), FUSIBLE_FIELDS(v, experts, tallied); }
  int64_t bytes() const { return choice_workspace(tokens, experts, tallied); }
};

struct ChooseBackwardLaunch : LaunchOf<ChoiceBackward, choose_backward> {
  static constexpr const char* kName = "choose_backward";

  void fields(Fields& v) {
    visit_stream(v, *this), visit_choice(v, call.rule);
    FUSIBLE_FIELDS(v, call.ids, call.d_weights, call.d_sums, call.d_squares, call.d_logits);
  }
};

struct RouteLaunch : LaunchOf<Route, route> {
  static constexpr const char* kName = "route";

  void fields(Fields& v) {
    visit_stream(v, *this), FUSIBLE_FIELDS(v, call.ids, call.int64_ids), v.rows("slots", call.slots);
    FUSIBLE_FIELDS(v, call.groups, call.tokens_per_expert, call.slot_of_row, call.row_of_slot, call.workspace);
    v.optional();
    v.field("weights", call.weights.data), v.field("weights_type", call.weights.type), v.field("scales", call.scales);
  }
};

struct RouteWorkspace {
  static constexpr const char* kName = "route_workspace_bytes";
  int64_t slots = 0;
  int groups = 0;

  void fields(Fields& v) { v.rows("slots", slots), v.field("groups", groups); }
  int64_t bytes() const { return route_workspace_bytes(slots, groups); }
};

inline void visit_routed(Fields& v, RoutedRows& call) {
  v.field("type", call.type), v.rows("tokens", call.tokens);
  FUSIBLE_FIELDS(v, call.columns, call.top_k, call.row_of_slot, call.num_rows, call.source, call.source_pitch, call.out,
                 call.out_pitch);
}

struct PermuteLaunch : OnStream {
  static constexpr const char* kName = "permute";
  RoutedRows call{};
  bool fill = false;

  void fields(Fields& v) { visit_stream(v, *this), visit_routed(v, call), v.field("fill", fill); }
  void run() const { permute(call, fill, device, stream); }
};

struct UnpermuteLaunch : LaunchOf<RoutedRows, unpermute> {
  static constexpr const char* kName = "unpermute";

  void fields(Fields& v) { visit_stream(v, *this), visit_routed(v, call); }
};

struct GatherSlotsLaunch : OnStream {
  static constexpr const char* kName = "gather_slots";
  const float* values = nullptr;
  const int32_t *row_of_slot = nullptr, *num_rows = nullptr;
  int64_t slots = 0;
  void* out = nullptr;
  DType type = DType::kFloat32;

  void fields(Fields& v) {
    visit_stream(v, *this), FUSIBLE_FIELDS(v, values, row_of_slot, num_rows), v.rows("slots", slots);
    FUSIBLE_FIELDS(v, out, type);
  }
  void run() const { gather_slots(values, row_of_slot, num_rows, slots, out, type, device, stream); }
};

struct RoutedMlpLaunch : OnStream {
  static constexpr const char* kName = "routed_mlp";
  RoutedMlp mlp{};
  RoutedTokens call{};

  void fields(Fields& v) {
    FUSIBLE_FIELDS(v, mlp.activation, mlp.type, mlp.groups, mlp.features, mlp.columns, mlp.transposed, mlp.unfused);
    v.field("up", mlp.up.data), v.field("up_pitch", mlp.up.pitch), v.field("up_group", mlp.up.group_stride);
    v.field("down", mlp.down.data), v.field("down_pitch", mlp.down.pitch);
    v.field("down_group", mlp.down.group_stride), v.field("up_bias", mlp.up_bias.data);
    v.field("up_bias_pitch", mlp.up_bias.pitch), v.field("down_bias", mlp.down_bias.data);
    v.field("down_bias_pitch", mlp.down_bias.pitch), v.field("bias_type", mlp.up_bias.type), visit_stream(v, *this);
    v.rows("tokens", call.tokens), FUSIBLE_FIELDS(v, call.top_k, call.x, call.pitch, call.ids, call.int64_ids);
    v.field("weights", call.weights.data), v.field("weights_type", call.weights.type);
    FUSIBLE_FIELDS(v, call.out, call.workspace);
  }
  void complete() {
    mlp.up.type = mlp.down.type = mlp.type;
    mlp.down_bias.type = mlp.up_bias.type;
  }
  void run() const { routed_mlp(mlp, call, device, stream); }
};

struct RoutedMlpWorkspace {
  static constexpr const char* kName = "routed_workspace_bytes";
  RoutedMlp mlp{};
  int64_t slots = 0;

  void fields(Fields& v) {
    FUSIBLE_FIELDS(v, mlp.activation.gated, mlp.type, mlp.groups, mlp.features, mlp.columns, mlp.unfused);
    v.rows("slots", slots);
  }
  int64_t bytes() const { return routed_workspace_bytes(mlp, slots); }
};

}  // namespace fusible
