// SPDX-License-Identifier: Apache-2.0
// Groups of any shapes: every group has its own m, n and k, which only the device knows. What the kernels share, and
// their launches.
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

// Matrices of the groups one after the other, each contiguous by rows; `elements` is what there is room for.
struct PackedMatrices {
  const void* data;
  int64_t elements;
  Dims rows, columns;
};

// Which of a group's matrices TMA cannot reach (it begins or has rows at no multiple of 16 bytes), or of
// which there is nothing: they are read and written by ordinary loads and stores.
enum NoTma : uint8_t { kNoTmaA = 1, kNoTmaB = 2, kNoTmaOut = 4 };

// What is known of a group once the device has looked.
struct RaggedGroup {
  int64_t a, b, out;  // where its matrices begin, in elements
  int m, n, k;        // zero, if what was asked for does not fit into the tensors
  int a_pitch, b_pitch;
  int tasks_end;  // tiles of this group and of all before it
  int no_tma;     // of enum NoTma
  int unused;
};
static_assert(sizeof(RaggedGroup) == 56);

// The maps of GemmParams are those of no group: all but address, sizes and pitch is true of every group's.
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
  bool zero_tail;    // what stands behind the last group is zeroed
};

struct RaggedWorkspace {
  unsigned* counter;
  uint4* edges;
  CUtensorMap* maps;
  RaggedGroup* groups;
};
// Of `memory`, which has ragged_workspace_bytes(groups) of them (fusible/ragged_gemm.h), at any alignment.
RaggedWorkspace lay_out_ragged(void* memory, int64_t groups);
int64_t bytes_of_ragged_workspace(int64_t groups);

// Fills the workspace to which `params` points.
cudaError_t prepare_ragged(const RaggedParams& params, const RaggedSource& source, int multiprocessors,
                           cudaStream_t stream);

// out = beta[g] * out; where beta is 0 nothing is read, where it is 1 nothing is done.
cudaError_t scale_ragged(const RaggedParams& params, DType type, const float* betas, float beta, int multiprocessors,
                         cudaStream_t stream);

// One instantiation for each operand type stands in a source of its own (kernels/ragged/ragged_bf16.cu, ...). The tile
// is kTileVariants[kRaggedVariant].
inline constexpr int kRaggedVariant = 0;
template <DType kOperand>
KernelEntry ragged_entry(Layout layout, bool fp32_output);

}  // namespace fusible
