// SPDX-License-Identifier: Apache-2.0
// The common part of launches of products with an activation in their epilogue.
#pragma once
#include "fusible/gemm_launch.h"
#include "kernels/activation/activation_params.h"

namespace fusible {

// Whether gate and up are half a row apart, so that a tile takes its columns from two places. `columns` are those of
// the activation here and below.
bool has_halves(const Activation& activation, int64_t columns);

// Whether a consumer's output stage in shared memory holds the up of each of its gates. Blocks narrower than eight are
// separated within sixteen columns.
bool block_fits(const Activation& activation, int64_t columns, const TileVariant& tile);

// Throws fusible::Error where no kernel ends in it.
void check_activation(const GemmProblem& problem, const Activation& activation, int64_t columns);

// Throws fusible::Error for column numbers without a kernel that reads them: a user function's kernel.
void check_vectors(const GemmProblem& problem, const Activation& activation, const ColumnVectors& vectors);

// As prepare_params.
ActivationParams activation_params(const GroupedGemm& call, const GemmConfig& config, const Activation& activation,
                                   const RowScale& scales, int64_t columns, cudaStream_t stream);

}  // namespace fusible
