// SPDX-License-Identifier: Apache-2.0
// Rows between GPUs that read one another's memory. Every rank has a buffer of the same form, at an address that the
// others know. Signals in those buffers order writes and reads. A lane signals its steps one after another, the same on
// all ranks, and waits for the signals of all ranks before the next step.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/arrivals.h"
#include "fusible/dtype.h"

namespace fusible {

inline constexpr int kMaxRanks = 16;
inline constexpr int kSignalBytes = 128;  // from one signal to the next: each has one writer, and a line of its own
inline constexpr int kKindBits = 16;      // of a signal, below its number

// The buffers of all ranks, as this one addresses them.
struct Peers {
  int rank, ranks;
  uintptr_t buffers[kMaxRanks];
};

// A lane, in memory of its device. Zero at first.
struct LaneState {
  uint64_t signals;           // that this rank has given
  uint32_t blocks;            // of the running kernel that are done with their part
  uint32_t failed;            // once set, kernels wait for no rank, and their results are NaN
  int64_t required, dropped;  // the most rows that a rank had to own, and how many were left out, so far
};

enum class Failure : int64_t { kNone, kLate, kOther, kOverflow };

// The report of kernels to the host, in host memory; `failure` is written last. Python reads it as a list of integers.
struct LaneReport {
  int64_t failure;
  int64_t peer;      // who did not come, or came for something else; who would own too many rows
  int64_t kind;      // what this rank waited for
  int64_t exchange;  // as the host counts them
  int64_t seen;      // the last signal of the peer; the rows that it would own
  int64_t came;      // a bit for each rank that was there
  int64_t required, dropped;
};

// The fields of every launch of a lane.
struct LaneCall {
  Peers peers;
  LaneState* state;
  LaneReport* report;
  int64_t exchange;
};

// Writes the given data to all ranks, announces that it and all earlier writes on the stream are visible, and waits for
// the announcements of all ranks.
struct Publish : LaneCall {
  int64_t signals_at;  // in a buffer: signals [2, ranks]; every other one overwrites
  int kind;
  int64_t timeout;  // nanoseconds; 0: for ever
  const void* ids;  // [slots], int32 or int64; null: neither ids nor numbers are written
  bool int64_ids;
  int64_t slots, most_slots;  // ids behind the first `slots` are of no expert
  int experts;
  int64_t ids_at;  // in a buffer: int32 [ranks, most_slots]
  const void* numbers;
  int number_bytes;    // 4 or 8
  int64_t numbers_at;  // in a buffer: [ranks, most_slots]
};

// Divides the rows of all experts among ranks. Gives `firsts` [ranks + 1], and the kept rows of each expert of this
// rank: a rank keeps its first `capacity` rows.
struct DivideRows : LaneCall {
  const int32_t* tokens_per_expert;  // [experts]
  int experts;
  int64_t capacity;
  bool fails;  // if a rank would own more
  int32_t* firsts;
  int32_t* split_sizes;  // [experts / ranks]
};

// Rows, or a number for each, at `at` in the buffers.
struct PeerRows : LaneCall {
  DType type;
  int64_t tokens, columns;  // tokens of one rank
  int top_k;
  const int32_t* row_of_slot;
  const int32_t* firsts;
  int64_t capacity;
  int64_t at;
  void* out;
  bool at_slots;  // at `at` are rows of this rank's slots, consecutively, rather than rows of ranks
};

// Copies the rows that this rank keeps to `at` in its buffer, or to the slots of their tokens in other ranks' buffers.
struct StageRows : PeerRows {
  const void* source;
  int64_t pitch;
  const int32_t* slot_of_row;  // of the rows of all ranks; null: they go to the buffer of this rank
  int64_t slots;               // of a rank
};

// Tokens of all ranks to the rows of this rank.
struct Pull : PeerRows {
  bool fill;  // the tail is zero
};

// Rows that are told of block by block, in their order: for a kernel behind it on the stream that waits for them.
struct PullBlocks : PeerRows {
  const int32_t* slot_of_row;  // of the rows of all ranks
  uint32_t* arrived;           // [blocks of kArrivalRows rows], zero
  int blocks;                  // of threads, at most one a multiprocessor
  bool fill;                   // the tail is zero
};

// Sums of rows.
struct PullSum : PeerRows {
  int blocks;  // as many multiprocessors add, and leave the others to other kernels; 0: all of them
};

// Sums of the rows of this rank by token of all ranks, to `at` in the tokens' ranks' buffers: [tokens, ranks, columns].
struct PushSums : PeerRows {
  const void* source;
  int64_t pitch;
  int blocks;  // as of PullSum
};

// Sums of what ranks pushed for the tokens of this one.
struct SumParts : PeerRows {};

// Numbers of slots and of rows, of 4 or 8 bytes each.
struct PeerNumbers : LaneCall {
  int number_bytes;
  int64_t slots;
  const int32_t* row_of_slot;
  const int32_t* firsts;
  int64_t capacity;
  int64_t at;
  void* out;
};

// All throw fusible::Error if a launch fails.
void publish(const Publish& call, int device, cudaStream_t stream);
void divide_rows(const DivideRows& call, int device, cudaStream_t stream);
void stage_rows(const StageRows& call, int device, cudaStream_t stream);
// Copies the tokens of all ranks to the rows of this rank.
void pull(const Pull& call, int device, cudaStream_t stream);
// The same by blocks of rows. Lets the next kernel of the stream begin.
void pull_blocks(const PullBlocks& call, int device, cudaStream_t stream);
// The pieces of a block of rows that pull_blocks tells of.
int pieces_of_block(const PeerRows& call);
// Each token of this rank is the sum of its rows, from the buffers of their owners, in fp32, in the order of the slots,
// rounded once.
void pull_sum(const PullSum& call, int device, cudaStream_t stream);
// The rows of each token of all ranks that this rank keeps are summed in fp32, in the order of the slots, rounded, and
// stored at the rank of the token, if there are any.
void push_sums(const PushSums& call, int device, cudaStream_t stream);
// Each token of this rank is the sum of the parts of the ranks that keep rows of it, in fp32, in the order of ranks,
// rounded once more.
void sum_parts(const SumParts& call, int device, cudaStream_t stream);
// Copies the numbers of slots of all ranks, from this rank's buffer, to the rows of this rank. The tail is zero.
void numbers_to_rows(const PeerNumbers& call, int device, cudaStream_t stream);
// Copies the numbers of rows, from the buffers of their owners, to the slots of this rank; 0 for slots without a row.
void pull_numbers(const PeerNumbers& call, int device, cudaStream_t stream);

}  // namespace fusible
