// SPDX-License-Identifier: Apache-2.0
// Groups of any shapes: every group has its own m, n and k, which only the device knows. The common parts of the
// kernels, and their launches.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/gemm/kernel_entry.h"

namespace fusible {

// Rows or columns of each group, or one number for all.
struct Dims {
  SplitSizes sizes;  // without data: `uniform`
  int64_t uniform;
};

// Matrices of the groups, one after another, each contiguous by rows; `elements`: the size of the buffer.
struct PackedMatrices {
  const void* data;
  int64_t elements;
  Dims rows, columns;
};

// The matrices of a group that TMA cannot reach (the start or the pitch is not a multiple of 16 bytes), or that are
// empty: they are read and written by ordinary loads and stores.
enum NoTma : uint8_t { kNoTmaA = 1, kNoTmaB = 2, kNoTmaOut = 4 };

// The facts on a group that the device has found.
struct RaggedGroup {
  int64_t a, b, out;  // where its matrices begin, in elements
  int m, n, k;        // zero if the requested size does not fit into the tensors
  int a_pitch, b_pitch;
  int tasks_end;  // tiles of this group and of all before it
  int no_tma;     // of enum NoTma
  int unused;
};
static_assert(sizeof(RaggedGroup) == 56);

// The maps of GemmParams are models: everything but address, sizes and pitch holds for every group.
struct RaggedParams : GemmParams {
  const RaggedGroup* groups;
  CUtensorMap* maps;  // [groups][3]: a, b, out
  const void *a_data, *b_data;
  void* out_data;
  int64_t a_elements, b_elements;
  uint4* edges;  // [2][2]: of a and b, the 16 aligned bytes in which the tensor begins and ends
                 // (device/gemm/cp_async_copy.cuh)
};

struct RaggedSource {
  PackedMatrices a, b;
  int64_t out_elements;
  Layout layout;
  int tile_m, tile_n;
  bool fp32_output;  // fp32 rather than 16 bits
  bool skip_empty;   // groups without depth have no tiles (accumulation)
  bool zero_tail;    // elements after the last group are zeroed
};

struct RaggedWorkspace {
  unsigned* counter;
  uint4* edges;
  CUtensorMap* maps;
  RaggedGroup* groups;
};
// The workspace in `memory`, which has ragged_workspace_bytes(groups) bytes (fusible/ragged_gemm.h), at any alignment.
RaggedWorkspace lay_out_ragged(void* memory, int64_t groups);
int64_t bytes_of_ragged_workspace(int64_t groups);

// Fills the workspace to which `params` points.
cudaError_t prepare_ragged(const RaggedParams& params, const RaggedSource& source, int multiprocessors,
                           cudaStream_t stream);

// out = beta[g] * out; where beta is 0 nothing is read, where it is 1 nothing is done.
cudaError_t scale_ragged(const RaggedParams& params, DType type, const float* betas, float beta, int multiprocessors,
                         cudaStream_t stream);

// The tile is kTileVariants[kRaggedVariant].
inline constexpr int kRaggedVariant = 0;
template <DType kOperand>
KernelEntry ragged_entry(Layout layout, bool fp32_output);

}  // namespace fusible
