// SPDX-License-Identifier: Apache-2.0
// The launches of csrc/fusible/fake_quantize.h as values (fusible/launches.h).
#pragma once
#include "fusible/fake_quantize.h"
#include "fusible/quantize_calls.h"

namespace fusible {

struct FakeQuantizeRowsLaunch : LaunchOf<FakeQuantizeRows, fake_quantize_rows> {
  static constexpr const char* kName = "fake_quantize_rows";

  void fields(Fields& v) {
    visit_stream(v, *this), v.field("format", call.format), v.field("type", call.type);
    v.rows("tokens", call.tokens), v.field("features", call.features), v.field("x", call.x);
    v.field("pitch", call.pitch), visit_groups(v, call.sizes);
    v.field("rows", call.rows), v.field("columns", call.columns);
    v.optional();
    v.field("slot_of_row", call.slot_of_row), v.field("top_k", call.top_k);
    v.field("is_transformed", call.is_transformed), v.field("row_amax", call.row_amax);
    v.field("column_amax", call.column_amax), v.field("seed", call.seed);
  }
};

struct FakeQuantizeWeightLaunch : LaunchOf<FakeQuantizeWeight, fake_quantize_weight> {
  static constexpr const char* kName = "fake_quantize_weight";
  Addresses addresses;

  void fields(Fields& v) {
    visit_stream(v, *this), v.field("format", call.format), v.field("type", call.type);
    v.field("groups", call.groups), v.field("n", call.n), v.field("k", call.k), v.field("weight", call.weight);
    v.field("pitch", call.pitch), v.field("group_stride", call.group_stride), v.field("addresses", addresses);
    v.field("rows", call.rows), v.field("columns", call.columns);
    v.optional();
    v.field("amax", call.amax);
  }
  void complete() { call.addresses = addresses; }
};

}  // namespace fusible
