// SPDX-License-Identifier: Apache-2.0
// The launches of csrc/fusible/fake_quantize.h as values (fusible/launches.h).
#pragma once
#include "fusible/fake_quantize.h"
#include "fusible/quantize_calls.h"

namespace fusible {

struct FakeQuantizeRowsLaunch : LaunchOf<FakeQuantizeRows, fake_quantize_rows> {
  static constexpr const char* kName = "fake_quantize_rows";

  void fields(Fields& v) {
    visit_stream(v, *this), FUSIBLE_FIELDS(v, call.format, call.type), v.rows("tokens", call.tokens);
    FUSIBLE_FIELDS(v, call.features, call.x, call.pitch), visit_groups(v, call.sizes);
    FUSIBLE_FIELDS(v, call.rows, call.columns);
    v.optional();
    FUSIBLE_FIELDS(v, call.slot_of_row, call.top_k, call.is_transformed, call.row_amax, call.column_amax, call.seed);
  }
};

struct FakeQuantizeWeightLaunch : LaunchOf<FakeQuantizeWeight, fake_quantize_weight> {
  static constexpr const char* kName = "fake_quantize_weight";
  Addresses addresses;

  void fields(Fields& v) {
    visit_stream(v, *this);
    FUSIBLE_FIELDS(v, call.format, call.type, call.groups, call.n, call.k, call.weight, call.pitch, call.group_stride,
                   addresses, call.rows, call.columns);
    v.optional();
    v.field("amax", call.amax);
  }
  void complete() { call.addresses = addresses; }
};

}  // namespace fusible
