// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs of e4m3 operands with scales of blocks of 128 values, or of whole rows. All scales decode: a value is
// its byte times its scale. Products of a block are summed by the tensor cores, blocks in fp32.
#pragma once
#include "fusible/grouped_gemm.h"
#include "fusible/quantize.h"

namespace fusible {

// out[t, :] = the epilogue of sum over b of a_scale[b, t] * b_scale[g, :, b] * (a[t, block b] b[g][:, block b]^T).
struct ScaledGemm {
  GroupedGemm gemm;       // kNT
  const float* a_scales;  // [blocks of k, T rounded up to 4]
  const float* b_scales;  // [E, blocks of n, blocks of k], at these distances
  int64_t b_scales_group, b_scales_row, b_scales_column;
  bool halves = false;  // the rows of b are two halves, and blocks start at each
};

// out[t, :] = the epilogue of a_scale[t] * b_scale[g, :] * (a[t] b[g]^T).
struct RowScaledGemm {
  GroupedGemm gemm;       // kNT
  const float* a_scales;  // [T]
  const float* b_scales;  // [E, n], at these distances
  int64_t b_scales_group, b_scales_row;
  bool fast = false;  // all of the depth is summed by the tensor cores
};

// activation(preact) * scales, rounded to the type of `preact` and quantised, where preact is the product: into its
// `out`, or nowhere if that has no data. n counts the columns of preact. Where gate and up stand half a row apart, a
// half is a multiple of 128.
struct ScaledActivation {
  ScaledGemm product;  // without factors of rows
  Activation activation;
  RowScale scales;
  bool power_of_two;
  QuantizedRows rows;
  ColumnVectors vectors;
};

// out[g] (+)= a[blocks of g] b[blocks of g]^T: tokens in blocks of 128 of a group, transposed. Group g uses ceil(size /
// 128) of T / 128 + E blocks, after those of the groups before it.
struct ScaledWgrad {
  GroupedGemm gemm;                  // kTN; a[blocks, m, 128], b[blocks, n, 128]
  const float *a_scales, *b_scales;  // [blocks, m], [blocks, n]
};

// All throw fusible::Error, with the problem and the configuration in the message. An empty group's weight gradient is
// zero, or unchanged when accumulating.
void scaled_gemm(const ScaledGemm& call, int device, cudaStream_t stream);
void row_scaled_gemm(const RowScaledGemm& call, int device, cudaStream_t stream);
void scaled_activation(const ScaledActivation& call, int device, cudaStream_t stream);
void scaled_wgrad(const ScaledWgrad& call, int device, cudaStream_t stream);

}  // namespace fusible
