// SPDX-License-Identifier: Apache-2.0
// The contents of a launch's workspace, and the kernel that writes them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/gemm/kernel_entry.h"

namespace fusible {

struct Workspace {
  unsigned* counter;             // of tasks; null for none
  GroupCoordinate* coordinates;  // [groups]; null where the matrices are one tensor
  const void** biases;           // [groups]; null where they are one tensor
  SplitK split_k;                // of a call that may split its depth
};

// The workspace in `memory`, which has workspace_bytes(groups) bytes (fusible/grouped_gemm.h).
Workspace lay_out(void* memory, int64_t groups);
int64_t bytes_of_workspace(int64_t groups);
// The same where the depth may be split: more of it.
Workspace lay_out_split_k(void* memory, int64_t groups);
int64_t bytes_of_split_k(int64_t groups);
inline constexpr int kArrivedCounters = kMostSlicedTasks * 2;  // of each consumer

// Fills the tables from `coordinates` and `biases`, which the kernel takes along as arguments: nothing of the host's is
// read after the call, and a captured graph keeps them.
cudaError_t prepare(const Workspace& workspace, std::span<const GroupCoordinate> coordinates,
                    std::span<const uintptr_t> biases, cudaStream_t stream);

}  // namespace fusible
