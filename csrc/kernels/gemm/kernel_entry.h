// SPDX-License-Identifier: Apache-2.0
// The host's view of a kernel: its parameters, and the instantiation for a problem.
#pragma once
#include <cuda.h>

#include "fusible/arrivals.h"
#include "fusible/gemm_config.h"
#include "fusible/groups.h"

namespace fusible {

// The coordinates of a group's matrix (its weight, or its weight gradient): the last two in the tensor map. In one
// tensor these are the number of the group and zero; matrices at arbitrary addresses count from the lowest, in units of
// 16 bytes and of 16 GB (fusible/tensor_map.h).
struct GroupCoordinate {
  int near, far;
};

struct WorkShape {
  SplitSizes sizes;    // of the groups in the token buffer; ragged groups have dims instead
  GroupWindow window;  // the groups of this launch
  int first_group;     // of the run whose matrices are one tensor; else 0
  int tokens;
  int fixed_rows;     // output rows of a group, where they are not its tokens
  int columns;        // column tiles
  bool narrow_end;    // of the last one, at most two thirds exist
  bool skip_empty;    // groups without tokens have no tasks although their output has rows (accumulation)
  bool may_halve;     // tiles, where that fills the GPU (weight gradients)
  bool may_split;     // the depth of long groups, likewise
  unsigned* counter;  // zero at launch; null for a static schedule
  const GroupCoordinate* coordinates;  // of each group; null where the matrices are one tensor
};

// Scales of whole rows of both operands, [T] and of all weights, in floats; products are multiplied by them.
struct OperandScales {
  const float *of_a, *of_b;
  int64_t b_group, b_row;
};

// Operands of `y = row_scale[t] * (alpha[g] * acc + bias_scale[t] * bias[g, n])`. A null pointer stands for ones
// (scales) or zeros (bias); where `alphas` is null, `alpha` holds for every group. Biases that are not one tensor are
// found through `biases`.
struct EpilogueParams {
  const void* bias;           // [groups, bias_pitch]
  const void* const* biases;  // [groups]; null where they are one tensor
  DType bias_type;
  int columns;
  int64_t bias_pitch;
  int half;                             // where a tile has columns of both halves of a row: how many a half has; else 0
  const float *row_scale, *bias_scale;  // [T]
  const float* alphas;                  // [groups]
  float alpha;
  OperandScales operands;  // where they have scales of whole rows
};

// The sums that blocks sharing the depth of a tile leave for one another (device/gemm/split_k.cuh).
struct SplitK {
  float* sums;        // of each slice, in vectors of four, [kMostSlicedTasks]; null: no depth is split
  uint32_t* arrived;  // zero at launch: warps that have left theirs, [kMostSlicedTasks, consumers]
};

// Launches of independent products that follow one another directly (fusible/independent.h).
struct Neighbours {
  bool beside;    // it begins beside the kernel before it, and waits for that one at its end
  bool followed;  // the next kernel does: it may begin where blocks of this one end
};

struct GemmParams {
  CUtensorMap a, b, out;
  WorkShape shape;
  EpilogueParams epilogue;
  int k_blocks;     // of all pairs of operands, where the depth is not the group's tokens
  bool accumulate;  // out += rather than out =
  bool fetch_all;   // a weight gradient fetches all old values of `out`, not only as many as fit
  Neighbours neighbours;
  SplitK split_k;
};

// A second pair of operands along the depth: the product of a kernel that has one goes on with it. `b` is one tensor.
struct SecondPair {
  CUtensorMap a, b;
  int k_blocks;    // blocks of the first pair, which come before
  bool short_end;  // the last block is one step of a product: 16 values
};
// Behind the parameters of the kernel without one.
template <class Params>
struct WithSecondPair : Params {
  SecondPair second;
};

// Weights as bytes: two codes each, with a scale for each 32 values of k. The second pair's are read from here, in
// bf16: [E, n, r] (kNT) or [E, r, k] (kNN).
struct PackedWeights {
  const uint8_t* scales;  // [E, rows, blocks]
  int rows, blocks;       // n, and those of k
  const void* second;
  int64_t second_pitch, second_group;
  int second_k, columns;  // 0: there is none; of the output
};
template <class Params>
struct WithPackedWeights : Params {
  PackedWeights packed;
};

struct KernelEntry {
  const void* function;
  int threads, shared_bytes;
};

// One instantiation for each layout and operand type stands in a source of its own (kernels/gemm/nt_bf16.cu, ...).
template <Layout kLayout, DType kOperand>
KernelEntry kernel_entry(bool fp32_output, bool scale_bias, int variant);

// The same with a second pair of operands, of kNT and kNN, into the operands' type (kernels/gemm/pair_nt_bf16.cu, ...).
template <Layout kLayout, DType kOperand>
KernelEntry pair_entry(bool scale_bias, int variant);

// The same with packed weights, of bf16; the second pair may be none (kernels/gemm/packed_nt_bf16.cu, ...).
template <Layout kLayout>
KernelEntry packed_entry();

KernelEntry find_kernel(const GemmProblem& problem, int variant);

}  // namespace fusible
