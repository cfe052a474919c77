// SPDX-License-Identifier: Apache-2.0
// Instantiations of the grouped GEMMs that end in an activation, or in its backward.
#pragma once
#include <span>

#include "fusible/zeroing.h"
#include "kernels/activation/activation_params.h"

namespace fusible {

// kNT or kNN, by the layout of the weights. `halves`: a tile has as many columns of gate as of up, half a row apart.
template <Layout kLayout, DType kOperand>
KernelEntry activation_entry(bool halves, bool scale_bias, int variant);
template <Layout kLayout, DType kOperand>
KernelEntry activation_backward_entry(int variant);
// The same of rows that another kernel brings, with WithArrivals<ActivationParams>.
template <Layout kLayout, DType kOperand>
KernelEntry arriving_activation_entry(bool halves, bool scale_bias, int variant);
// The same with a second pair of operands.
template <Layout kLayout, DType kOperand>
KernelEntry pair_activation_entry(bool halves, bool scale_bias, int variant);
template <Layout kLayout, DType kOperand>
KernelEntry pair_activation_backward_entry(int variant);

// out[t] = the sum of dscale_partials[0 .. count)[t], in that order, as a number of the type; zero for the rows of no
// group.
void sum_dscale_partials(const float* dscale_partials, int count, int64_t tokens, const SplitSizes& sizes, void* out,
                         DType type, cudaStream_t stream);

// The sums over the rows of each group, or over all, of what blocks of 64 rows have summed by column.
struct ColumnPartials {
  const float* partials;  // [blocks, columns]
  int columns;
  bool of_all_rows;
  void* out;  // [groups or 1, columns], or among twice as many: blocks of gate and of up alternate
  DType type;
  int block;  // their width; 0: there are no blocks
};
// Several of them, in a fixed order, by one launch.
struct ColumnSumsOfBlocks {
  SplitSizes sizes;
  int tokens, count;
  ColumnPartials outputs[1 + kColumnInputs];
};
void sum_column_partials(const ColumnSumsOfBlocks& call, cudaStream_t stream);

// Bytes of the partials: a sum for each column of tokens / 64 + groups blocks, rounded up by the row: linear in rows.
constexpr int64_t column_partials_bytes(int64_t groups, int64_t tokens, int64_t columns) {
  return tokens * blocks_of(columns, 16) + groups * columns * int64_t{sizeof(float)};
}

// Adds up the wanted gradients of column numbers from `partials`, which has the blocks of 64 rows of one input after
// those of the previous one. `block`: the block of gate and up.
void add_dvectors(ColumnSumsOfBlocks& sums, std::span<const DVector> dvectors, const float* partials, int columns,
                  int block);

}  // namespace fusible
