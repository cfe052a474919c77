// SPDX-License-Identifier: Apache-2.0
// The work queue of a block: which task comes next, and the tiles that tasks become, on their way to every role.
//
// Without a counter in device memory the schedule is static: cluster c takes tasks c, c + clusters, ... With one, a
// cluster asks for a task when it is ready for it, which evens out tasks of different sizes. The first block's producer
// then asks, a tile ahead, and sends the number to the other block's producer. Each producer finds its tile
// (tile_scheduler.cuh), which takes several hundred cycles, and leaves it in the shared memory of its block, where the
// other roles read it.
#pragma once
#include "device/ptx/barrier.cuh"
#include "kernels/gemm/kernel_entry.h"

namespace fusible {

constexpr int kQueueDepth = 4;

// One of the slices of a tile's depth (split_k.cuh), in the bits of one register.
struct Slice {
  uint32_t bits = 0;  // 0: all of the depth
  Slice() = default;
  // `sums`: the position of the sums of the tile's first slice; those of the next one are `stride` further.
  DEVICE Slice(int index, int count, int sums, int stride)
      : bits(count > 1 ? index << 28 | count << 24 | sums << 12 | stride : 0) {}
  DEVICE int index() const { return bits >> 28; }
  DEVICE int count() const { return bits >> 24 & 15; }
  DEVICE int sums() const { return bits >> 12 & 4095; }
  DEVICE int stride() const { return bits & 4095; }
  // Whether another block adds to its sums, and stores the tile.
  DEVICE bool partial() const { return index() + 1 < count(); }
};

struct WorkTile {
  int group;                   // -1 after the last tile
  int tokens_start, tokens;    // the group's first token in the buffer, and its number of tokens
  GroupCoordinate coordinate;  // of the group's matrix
  int row, rows;               // the tile's first output row, counted within the group, and how many of its rows exist
  int column;                  // index of the column tile
  bool share_a;                // both blocks of the cluster have these rows, and each its own column
  bool idle;                   // nothing to compute here: this block only helps the other one to its half of A
  Slice slice;                 // set if the group's depth is split; the tokens are those of the slice
};

struct WorkQueue {
  int numbers[kQueueDepth];            // of tasks, sent by the first block of a cluster of two to the second
  uint64_t number_sent[kQueueDepth];   // of the second block
  uint64_t number_taken[kQueueDepth];  // of the first block
  WorkTile tiles[kQueueDepth];
  uint64_t tile_ready[kQueueDepth], tile_taken[kQueueDepth];

  // `readers` are the threads that read every tile.
  DEVICE void init(int readers) {
    for (int i = 0; i < kQueueDepth; ++i) {
      barrier_init(&number_sent[i], 1);
      barrier_init(&number_taken[i], 1);
      barrier_init(&tile_ready[i], 1);
      barrier_init(&tile_taken[i], readers);
    }
  }
};

// A producer's end: numbers of tasks in, work tiles out.
template <int kCluster>
class WorkTileWriter {
 public:
  DEVICE WorkTileWriter(WorkQueue& queue, unsigned* counter, int rank)
      : queue_(queue),
        counter_(rank == 0 ? counter : nullptr),
        dynamic_(counter),
        sends_(kCluster > 1 && counter),
        task_(blockIdx.x / kCluster) {
    if (counter_) next_ = atomicAdd(counter_, 1u);
  }

  DEVICE int task() const { return task_; }  // the one in hand; the first is known from the start

  // Makes the task after this one known; once per tile, some time before `advance`.
  DEVICE void request() {
    if (!dynamic_) return;
    if (counter_) {
      requested_ = next_ + gridDim.x / kCluster;
      if (sends_) {
        barrier_wait(&queue_.number_taken[state_.stage], state_.phase ^ 1);
        barrier_send(&queue_.numbers[state_.stage], requested_, &queue_.number_sent[state_.stage], 1);
      }
      next_ = atomicAdd(counter_, 1u);  // needed a tile later: its latency is hidden
    } else {
      barrier_arrive_expecting(&queue_.number_sent[state_.stage], sizeof(int));
    }
  }
  DEVICE void advance() {
    if (!dynamic_) {
      task_ += gridDim.x / kCluster;
      return;
    }
    if (counter_) {
      task_ = requested_;
    } else {
      barrier_wait(&queue_.number_sent[state_.stage], state_.phase);
      task_ = queue_.numbers[state_.stage];
      barrier_arrive_remote(&queue_.number_taken[state_.stage], 0);
    }
    state_.advance();
  }

  DEVICE void publish(const WorkTile& tile) {
    barrier_wait(&queue_.tile_taken[tiles_.stage], tiles_.phase ^ 1);
    queue_.tiles[tiles_.stage] = tile;
    barrier_arrive(&queue_.tile_ready[tiles_.stage]);
    tiles_.advance();
  }

 private:
  WorkQueue& queue_;
  unsigned* counter_;
  bool dynamic_, sends_;
  int task_, requested_ = 0;
  unsigned next_ = 0;
  PipelineState<kQueueDepth> state_, tiles_;
};

// Any other role's end: the work tiles in turn. For each thread of it alone.
class WorkTileReader {
 public:
  DEVICE explicit WorkTileReader(WorkQueue& queue) : queue_(queue) {}

  // False when all tiles are done.
  DEVICE bool next(WorkTile& tile) {
    barrier_wait(&queue_.tile_ready[state_.stage], state_.phase);
    tile = queue_.tiles[state_.stage];
    barrier_arrive(&queue_.tile_taken[state_.stage]);
    state_.advance();
    return tile.group >= 0;
  }

 private:
  WorkQueue& queue_;
  PipelineState<kQueueDepth> state_;
};

}  // namespace fusible
