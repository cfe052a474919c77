// SPDX-License-Identifier: Apache-2.0
// The launches between ranks as values (fusible/launches.h).
#pragma once
#include "fusible/launch_calls.h"
#include "fusible/row_slots.h"

namespace fusible {

inline void set_buffers(Peers& peers, const Addresses& buffers) {
  FUSIBLE_CHECK(buffers.size() <= kMaxRanks, "at most ", kMaxRanks, " ranks, got ", buffers.size());
  peers.ranks = static_cast<int>(buffers.size());
  std::copy(buffers.begin(), buffers.end(), peers.buffers);
}

template <class CallOf, auto kFunction>
struct LaneLaunch : LaunchOf<CallOf, kFunction> {
  Addresses buffers;

  void visit_lane(Fields& v) {
    LaneCall& call = this->call;
    visit_stream(v, *this), FUSIBLE_FIELDS(v, call.peers.rank, buffers, call.state, call.report, call.exchange);
  }
  void complete() { set_buffers(this->call.peers, buffers); }
};

struct PublishLaunch : LaneLaunch<Publish, publish> {
  static constexpr const char* kName = "publish";

  void fields(Fields& v) {
    visit_lane(v), FUSIBLE_FIELDS(v, call.signals_at, call.kind, call.timeout);
    v.optional();
    FUSIBLE_FIELDS(v, call.ids, call.int64_ids), v.rows("slots", call.slots);
    FUSIBLE_FIELDS(v, call.most_slots, call.experts, call.ids_at, call.numbers, call.number_bytes, call.numbers_at);
  }
};

struct DivideRowsLaunch : LaneLaunch<DivideRows, divide_rows> {
  static constexpr const char* kName = "divide_rows";

  void fields(Fields& v) {
    visit_lane(v);
    FUSIBLE_FIELDS(v, call.tokens_per_expert, call.experts, call.capacity, call.fails, call.firsts, call.split_sizes);
  }
};

template <class CallOf, auto kFunction>
struct PeerRowsLaunch : LaneLaunch<CallOf, kFunction> {
  void visit_peer_rows(Fields& v) {
    PeerRows& call = this->call;
    this->visit_lane(v), v.field("type", call.type), v.rows("tokens", call.tokens);
    FUSIBLE_FIELDS(v, call.columns, call.top_k, call.row_of_slot, call.firsts, call.capacity, call.at, call.out);
  }
};

struct StageRowsLaunch : PeerRowsLaunch<StageRows, stage_rows> {
  static constexpr const char* kName = "stage_rows";

  void fields(Fields& v) {
    visit_peer_rows(v), FUSIBLE_FIELDS(v, call.source, call.pitch);
    v.optional();
    FUSIBLE_FIELDS(v, call.slot_of_row, call.slots);
  }
};

struct PullLaunch : PeerRowsLaunch<Pull, pull> {
  static constexpr const char* kName = "pull";

  void fields(Fields& v) { visit_peer_rows(v), v.field("fill", call.fill); }
};

struct PullBlocksLaunch : PeerRowsLaunch<PullBlocks, pull_blocks> {
  static constexpr const char* kName = "pull_blocks";

  void fields(Fields& v) {
    visit_peer_rows(v), FUSIBLE_FIELDS(v, call.slot_of_row, call.arrived, call.blocks, call.fill);
  }
};

struct PullSumLaunch : PeerRowsLaunch<PullSum, pull_sum> {
  static constexpr const char* kName = "pull_sum";

  void fields(Fields& v) {
    visit_peer_rows(v), v.field("blocks", call.blocks);
    v.optional();
    v.field("at_slots", call.at_slots);
  }
};

struct PushSumsLaunch : PeerRowsLaunch<PushSums, push_sums> {
  static constexpr const char* kName = "push_sums";

  void fields(Fields& v) { visit_peer_rows(v), FUSIBLE_FIELDS(v, call.source, call.pitch, call.blocks); }
};

struct SumPartsLaunch : PeerRowsLaunch<SumParts, sum_parts> {
  static constexpr const char* kName = "sum_parts";

  void fields(Fields& v) { visit_peer_rows(v); }
};

template <auto kFunction>
struct PeerNumbersLaunch : LaneLaunch<PeerNumbers, kFunction> {
  void fields(Fields& v) {
    PeerNumbers& call = this->call;
    this->visit_lane(v), v.field("number_bytes", call.number_bytes), v.rows("slots", call.slots);
    FUSIBLE_FIELDS(v, call.row_of_slot, call.firsts, call.capacity, call.at, call.out);
  }
};

struct NumbersToRowsLaunch : PeerNumbersLaunch<numbers_to_rows> {
  static constexpr const char* kName = "numbers_to_rows";
};

struct PullNumbersLaunch : PeerNumbersLaunch<pull_numbers> {
  static constexpr const char* kName = "pull_numbers";
};

// A grouped GEMM of kNT whose rows go to slots.
struct GemmToSlotsLaunch : GemmLaunch {
  static constexpr const char* kName = "gemm_to_slots";
  RowSlots slots{};
  Addresses buffers;

  void fields(Fields& v) {
    visit_product(v);
    FUSIBLE_FIELDS(v, slots.peers.rank, buffers, slots.state, slots.slot_of_row, slots.firsts, slots.slots, slots.at);
    v.optional();
    visit_bias(v), v.field("row_scale", gemm.epilogue.row_scale), visit_schedule(v);
  }
  void complete() {
    gemm.problem.output = gemm.problem.operand;
    GemmLaunch::complete();
    gemm.problem.scale_bias |= gemm.epilogue.row_scale || gemm.epilogue.bias_scale;
    set_buffers(slots.peers, buffers);
    gemm.out.data = reinterpret_cast<const void*>(buffers[slots.peers.rank] + slots.at);
    gemm.out.pitch = gemm.problem.n;
  }
  void run() const { gemm_to_slots(gemm, slots, device, stream); }
};

}  // namespace fusible
