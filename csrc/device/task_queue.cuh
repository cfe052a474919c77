// Hands out task numbers, the same ones to every role of both blocks of a cluster.
//
// Without a counter in device memory the schedule is static: cluster c takes tasks c, c + clusters, ... With one, a cluster asks for
// a task when it is ready for it, which evens out tasks of different sizes. The first block's producer then asks, a tile ahead, and
// sends the number to the shared memory of both blocks.
#pragma once
#include "device/barrier.cuh"

namespace fusible {

constexpr int kQueueDepth = 4;

struct TaskQueue {
  int tasks[kQueueDepth];
  uint64_t full[kQueueDepth];   // one arrival of the block's own producer; in a cluster of two, also the four bytes of a task
  uint64_t empty[kQueueDepth];  // of the first block: every role of the cluster has taken the task

  DEVICE void init(int takers) {
    for (int i = 0; i < kQueueDepth; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], takers);
    }
  }
};

// The producer's end, of both blocks.
template <int kCluster>
class TaskSource {
 public:
  DEVICE TaskSource(TaskQueue& queue, unsigned* counter, int rank) : queue_(queue), counter_(rank == 0 ? counter : nullptr), dynamic_(counter) {
    if (counter_) next_ = atomicAdd(counter_, 1u);
  }

  // Makes way for one more task, and sends it if this is the first block; once per tile.
  DEVICE void provide() {
    if (!dynamic_) return;
    if constexpr (kCluster > 1) barrier_arrive_expecting(&queue_.full[ring_.stage], sizeof(int));
    if (counter_) {
      barrier_wait(&queue_.empty[ring_.stage], ring_.phase ^ 1);
      const int task = next_ + gridDim.x / kCluster;
      if constexpr (kCluster == 1) {
        queue_.tasks[ring_.stage] = task;
        barrier_arrive(&queue_.full[ring_.stage]);
      } else {
#pragma unroll
        for (int block = 0; block < kCluster; ++block) barrier_send(&queue_.tasks[ring_.stage], task, &queue_.full[ring_.stage], block);
      }
      next_ = atomicAdd(counter_, 1u);  // needed a tile later: its latency is hidden
    }
    ring_.advance();
  }

 private:
  TaskQueue& queue_;
  unsigned* counter_;
  bool dynamic_;
  unsigned next_ = 0;
  Ring<kQueueDepth> ring_;
};

// A taker's end: a role of one thread, or of a whole warp.
template <int kCluster>
class TaskTaker {
 public:
  DEVICE TaskTaker(TaskQueue& queue, bool dynamic, bool whole_warp)
      : queue_(queue), dynamic_(dynamic), whole_warp_(whole_warp), task_(blockIdx.x / kCluster) {}

  DEVICE int task() const { return task_; }
  DEVICE void advance() {
    if (!dynamic_) {
      task_ += gridDim.x / kCluster;
      return;
    }
    barrier_wait(&queue_.full[ring_.stage], ring_.phase);
    if (!whole_warp_ || threadIdx.x % 32 == 0) {
      task_ = queue_.tasks[ring_.stage];
      if constexpr (kCluster == 1) barrier_arrive(&queue_.empty[ring_.stage]);
      else barrier_arrive_remote(&queue_.empty[ring_.stage], 0);
    }
    if (whole_warp_) task_ = __shfl_sync(~0u, task_, 0);
    ring_.advance();
  }

 private:
  TaskQueue& queue_;
  bool dynamic_, whole_warp_;
  int task_;
  Ring<kQueueDepth> ring_;
};

}  // namespace fusible
