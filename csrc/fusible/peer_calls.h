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
    visit_stream(v, *this), v.field("rank", call.peers.rank), v.field("buffers", buffers);
    v.field("state", call.state), v.field("report", call.report), v.field("exchange", call.exchange);
  }
  void complete() { set_buffers(this->call.peers, buffers); }
};

struct PublishLaunch : LaneLaunch<Publish, publish> {
  static constexpr const char* kName = "publish";

  void fields(Fields& v) {
    visit_lane(v), v.field("signals_at", call.signals_at), v.field("kind", call.kind);
    v.field("timeout", call.timeout);
    v.optional();
    v.field("ids", call.ids), v.field("int64_ids", call.int64_ids), v.rows("slots", call.slots);
    v.field("most_slots", call.most_slots), v.field("experts", call.experts), v.field("ids_at", call.ids_at);
    v.field("numbers", call.numbers), v.field("number_bytes", call.number_bytes);
    v.field("numbers_at", call.numbers_at);
  }
};

struct DivideRowsLaunch : LaneLaunch<DivideRows, divide_rows> {
  static constexpr const char* kName = "divide_rows";

  void fields(Fields& v) {
    visit_lane(v), v.field("tokens_per_expert", call.tokens_per_expert), v.field("experts", call.experts);
    v.field("capacity", call.capacity), v.field("fails", call.fails), v.field("firsts", call.firsts);
    v.field("split_sizes", call.split_sizes);
  }
};

template <class CallOf, auto kFunction>
struct PeerRowsLaunch : LaneLaunch<CallOf, kFunction> {
  void visit_peer_rows(Fields& v) {
    PeerRows& call = this->call;
    this->visit_lane(v), v.field("type", call.type), v.rows("tokens", call.tokens), v.field("columns", call.columns);
    v.field("top_k", call.top_k), v.field("row_of_slot", call.row_of_slot), v.field("firsts", call.firsts);
    v.field("capacity", call.capacity), v.field("at", call.at), v.field("out", call.out);
  }
};

struct StageRowsLaunch : PeerRowsLaunch<StageRows, stage_rows> {
  static constexpr const char* kName = "stage_rows";

  void fields(Fields& v) {
    visit_peer_rows(v), v.field("source", call.source), v.field("pitch", call.pitch);
    v.optional();
    v.field("slot_of_row", call.slot_of_row), v.field("slots", call.slots);
  }
};

struct PullLaunch : PeerRowsLaunch<Pull, pull> {
  static constexpr const char* kName = "pull";

  void fields(Fields& v) { visit_peer_rows(v), v.field("fill", call.fill); }
};

struct PullBlocksLaunch : PeerRowsLaunch<PullBlocks, pull_blocks> {
  static constexpr const char* kName = "pull_blocks";

  void fields(Fields& v) {
    visit_peer_rows(v), v.field("slot_of_row", call.slot_of_row), v.field("arrived", call.arrived);
    v.field("blocks", call.blocks), v.field("fill", call.fill);
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

  void fields(Fields& v) {
    visit_peer_rows(v), v.field("source", call.source), v.field("pitch", call.pitch), v.field("blocks", call.blocks);
  }
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
    v.field("row_of_slot", call.row_of_slot), v.field("firsts", call.firsts), v.field("capacity", call.capacity);
    v.field("at", call.at), v.field("out", call.out);
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
    visit_product(v), v.field("rank", slots.peers.rank), v.field("buffers", buffers), v.field("state", slots.state);
    v.field("slot_of_row", slots.slot_of_row), v.field("firsts", slots.firsts), v.field("slots", slots.slots);
    v.field("at", slots.at);
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
