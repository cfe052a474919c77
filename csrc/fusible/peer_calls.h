// SPDX-License-Identifier: Apache-2.0
// The launches between ranks as values (fusible/launches.h).
#pragma once
#include "fusible/launch_calls.h"
#include "fusible/row_slots.h"

namespace fusible {

struct LaneLaunch : OnStream {
  Addresses buffers;

  template <class Visitor>
  void visit_lane(Visitor& v, LaneCall& call) {
    visit_stream(v, *this), v.field("rank", call.peers.rank), v.field("buffers", buffers);
    v.field("state", call.state), v.field("report", call.report), v.field("exchange", call.exchange);
  }
  void complete(LaneCall& call) const {
    FUSIBLE_CHECK(buffers.size() <= kMaxRanks, "at most ", kMaxRanks, " ranks, got ", buffers.size());
    call.peers.ranks = static_cast<int>(buffers.size());
    std::copy(buffers.begin(), buffers.end(), call.peers.buffers);
  }
};

struct PublishLaunch : LaneLaunch {
  static constexpr const char* kName = "publish";
  Publish call{};

  template <class Visitor>
  void fields(Visitor& v) {
    visit_lane(v, call), v.field("signals_at", call.signals_at), v.field("kind", call.kind);
    v.field("timeout", call.timeout);
    v.optional();
    v.field("ids", call.ids), v.field("int64_ids", call.int64_ids), v.rows("slots", call.slots);
    v.field("most_slots", call.most_slots), v.field("experts", call.experts), v.field("ids_at", call.ids_at);
    v.field("numbers", call.numbers), v.field("number_bytes", call.number_bytes);
    v.field("numbers_at", call.numbers_at);
  }
  void complete() { LaneLaunch::complete(call); }
  void run() const { publish(call, device, stream); }
};

struct DivideRowsLaunch : LaneLaunch {
  static constexpr const char* kName = "divide_rows";
  DivideRows call{};

  template <class Visitor>
  void fields(Visitor& v) {
    visit_lane(v, call), v.field("tokens_per_expert", call.tokens_per_expert), v.field("experts", call.experts);
    v.field("capacity", call.capacity), v.field("fails", call.fails), v.field("firsts", call.firsts);
    v.field("split_sizes", call.split_sizes);
  }
  void complete() { LaneLaunch::complete(call); }
  void run() const { divide_rows(call, device, stream); }
};

template <class Call = PeerRows>
struct PeerRowsLaunch : LaneLaunch {
  Call call{};

  template <class Visitor>
  void visit_peer_rows(Visitor& v) {
    visit_lane(v, call), v.field("type", call.type), v.rows("tokens", call.tokens), v.field("columns", call.columns);
    v.field("top_k", call.top_k), v.field("row_of_slot", call.row_of_slot), v.field("firsts", call.firsts);
    v.field("capacity", call.capacity), v.field("at", call.at), v.field("out", call.out);
  }
  void complete() { LaneLaunch::complete(call); }
};

struct StageRowsLaunch : PeerRowsLaunch<StageRows> {
  static constexpr const char* kName = "stage_rows";

  template <class Visitor>
  void fields(Visitor& v) {
    visit_peer_rows(v), v.field("source", call.source), v.field("pitch", call.pitch);
    v.optional();
    v.field("slot_of_row", call.slot_of_row), v.field("slots", call.slots);
  }
  void run() const { stage_rows(call, device, stream); }
};

struct PullLaunch : PeerRowsLaunch<> {
  static constexpr const char* kName = "pull";
  bool fill = false;

  template <class Visitor>
  void fields(Visitor& v) {
    visit_peer_rows(v), v.field("fill", fill);
  }
  void run() const { pull(call, fill, device, stream); }
};

struct PullBlocksLaunch : PeerRowsLaunch<PullBlocks> {
  static constexpr const char* kName = "pull_blocks";
  bool fill = false;

  template <class Visitor>
  void fields(Visitor& v) {
    visit_peer_rows(v), v.field("slot_of_row", call.slot_of_row), v.field("arrived", call.arrived);
    v.field("blocks", call.blocks), v.field("fill", fill);
  }
  void run() const { pull_blocks(call, fill, device, stream); }
};

struct PullSumLaunch : PeerRowsLaunch<> {
  static constexpr const char* kName = "pull_sum";
  int blocks = 0;

  template <class Visitor>
  void fields(Visitor& v) {
    visit_peer_rows(v), v.field("blocks", blocks);
    v.optional();
    v.field("at_slots", call.at_slots);
  }
  void run() const { pull_sum(call, blocks, device, stream); }
};

struct PeerNumbersLaunch : LaneLaunch {
  PeerNumbers call{};

  template <class Visitor>
  void fields(Visitor& v) {
    visit_lane(v, call), v.field("number_bytes", call.number_bytes), v.rows("slots", call.slots);
    v.field("row_of_slot", call.row_of_slot), v.field("firsts", call.firsts), v.field("capacity", call.capacity);
    v.field("at", call.at), v.field("out", call.out);
  }
  void complete() { LaneLaunch::complete(call); }
};

struct NumbersToRowsLaunch : PeerNumbersLaunch {
  static constexpr const char* kName = "numbers_to_rows";
  void run() const { numbers_to_rows(call, device, stream); }
};

struct PullNumbersLaunch : PeerNumbersLaunch {
  static constexpr const char* kName = "pull_numbers";
  void run() const { pull_numbers(call, device, stream); }
};

// A grouped GEMM of kNT whose rows go to slots.
struct GemmToSlotsLaunch : GemmLaunch {
  static constexpr const char* kName = "gemm_to_slots";
  RowSlots slots{};
  Addresses buffers;

  template <class Visitor>
  void fields(Visitor& v) {
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
    slots.peers.ranks = static_cast<int>(buffers.size());
    std::copy(buffers.begin(), buffers.end(), slots.peers.buffers);
    gemm.out.data = reinterpret_cast<const void*>(buffers[slots.peers.rank] + slots.at);
    gemm.out.pitch = gemm.problem.n;
  }
  void run() const { gemm_to_slots(gemm, slots, device, stream); }
};

}  // namespace fusible
