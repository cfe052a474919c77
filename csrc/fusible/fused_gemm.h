// SPDX-License-Identifier: Apache-2.0
// The public C++ API of the grouped GEMMs whose epilogue is an activation or its backward.
#pragma once
#include <vector>

#include "fusible/activation.h"
#include "fusible/arrivals.h"
#include "fusible/grouped_gemm.h"

namespace fusible {

// Positions in kTileVariants of the tiles that these kernels are built for.
inline constexpr int kActivationVariants[] = {3, 6}, kBackwardVariants[] = {5};
inline constexpr int kDeepActivationVariant = 9;  // without bias and second pair
// The variants that user functions are compiled for. The last one's kernel may be missing.
inline constexpr int kFunctionVariants[] = {kActivationVariants[0], kActivationVariants[1], kDeepActivationVariant};

// postact = activation(preact) * scales with preact = `gemm`, which is kNT or kNN into `gemm.out`, or nowhere if that
// is null. Rows of preact and postact are dense; n counts the columns of preact.
struct LinearActivation {
  GroupedGemm gemm;
  Activation activation;
  RowScale scales;
  void* postact;
  ColumnVectors vectors;
  Arrivals arrivals;  // of the rows of `gemm.a`, where another kernel brings them; bf16 rows and kNT weights alone.
                      // If weights or biases are at arbitrary addresses, the product waits for that kernel. The
                      // workspace is zero then: nothing may be launched between that kernel and this one.
};

// With dpostact = `gemm`, which is kNN or kNT and is not stored: see ActivationBackward. n counts the columns of
// postact; rows are dense.
struct LinearActivationBackward {
  GroupedGemm gemm;
  Activation activation;
  RowScale scales;
  const void* preact;
  void *dpreact, *dscales, *postact;  // dscales in the type of the scales
  void* dbias;  // [groups, columns of preact]: the sums of dpreact over the rows of each group; zero for an empty one
  DType dbias_type;
  ColumnVectors vectors;
  std::vector<DVector> dvectors;  // one for each of the vectors; none: not wanted
};

// Bytes of `gemm.workspace` that the backward needs, aligned to 16: with dscales, each subtile's share of them; with
// dbias, whose rows have `bias_columns` (0: none), the sums over blocks of 64 rows; and so for that many dvectors.
int64_t backward_workspace_bytes(int64_t groups, int64_t tokens, int64_t columns, bool dscales, int64_t bias_columns,
                                 int64_t dvectors);

// Chooses the tile variant and its settings.
GemmConfig choose_activation_config(const GemmProblem& problem, const Activation& activation, int multiprocessors,
                                    int variant = -1);
GemmConfig choose_backward_config(const GemmProblem& problem, int multiprocessors, int variant = -1);

// Both throw fusible::Error, like grouped_gemm. Rows outside of every group are not touched, except that dscales
// becomes zero there.
void linear_activation(const LinearActivation& call, int device, cudaStream_t stream);
void linear_activation_backward(const LinearActivationBackward& call, int device, cudaStream_t stream);

}  // namespace fusible
