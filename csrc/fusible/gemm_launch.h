// SPDX-License-Identifier: Apache-2.0
// The steps of a launch that every kernel of the grouped GEMM shares.
#pragma once
#include "fusible/grouped_gemm.h"
#include "kernels/gemm/kernel_entry.h"

namespace fusible {

// The same call, with matrices that lie at equal distances stated as one tensor.
GroupedGemm as_strided(const GroupedGemm& wanted);

// Throws fusible::Error where no kernel runs on the device, or takes so many groups.
void check_device(const GemmProblem& problem, int device);

// Throws fusible::Error if the kernels do not support the call.
void check(const GroupedGemm& call, int device);

// The checks common to both kinds of operands: shapes, sizes, alignment.
void check_shapes(const GroupedGemm& call, int device);

// The weight gradients of no tokens.
void zero_output(const GroupedGemm& call, cudaStream_t stream);

// Fills the workspace, on the stream, and the parameters; `prepare_shape` leaves out the tensor maps.
GemmParams prepare_shape(const GroupedGemm& call, const GemmConfig& config, cudaStream_t stream);
GemmParams prepare_params(const GroupedGemm& call, const GemmConfig& config, cudaStream_t stream);

// Maps of the second pair of operands; empty without one.
SecondPair second_pair(const GroupedGemm& call, const GemmConfig& config);

// One launch for each window of the groups of a run (none: of all), which it writes to `params`. These may be longer
// than GemmParams, with which they begin.
void launch(GemmParams& params, const KernelEntry& kernel, const GemmConfig& config, const GemmProblem& problem,
            int device, cudaStream_t stream, GroupWindow run = {});

}  // namespace fusible
