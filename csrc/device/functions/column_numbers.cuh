// SPDX-License-Identifier: Apache-2.0
// The column operands of a user's function in a tile, and their gradients.
#pragma once
#include "device/functions/pointwise.cuh"
#include "device/ptx/vector.cuh"
#include "device/rows/rows.cuh"
#include "kernels/activation/activation_params.h"

namespace fusible {

// So many inputs with numbers of columns, in fp32, of a lane's eight neighbouring columns.
template <int kCount>
struct ColumnFloats {
  float of[kCount ? kCount : 1][8];
};

// The same in their stored types, fetched before they are needed, as device memory is slow. Operands: their
// types, ColumnOperand. kNarrow: blocks of gate and up are narrower than a vector. The source needs `vectors`,
// `columns` and `block`, like ActivationParams.
template <class Operands, bool kNarrow, int kInput = 0>
struct ColumnNumbers {
  template <class Source>
  DEVICE void fetch(const Source&, int, int) {}
  DEVICE void stay_as_stored() {}
  template <int kCount>
  DEVICE void convert_to(ColumnFloats<kCount>&) const {}
};
template <class Operand, class... Others, bool kNarrow, int kInput>
struct ColumnNumbers<Types<Operand, Others...>, kNarrow, kInput> {
  using Number = typename Operand::Number;
  Vector<Number, 8> numbers;
  ColumnNumbers<Types<Others...>, kNarrow, kInput + 1> others;

  // Columns that do not exist have no numbers.
  template <class Source>
  DEVICE void fetch(const Source& p, int group, int column) {
    if (column >= p.columns) return;
    const int64_t columns = int64_t{p.columns} * (Operand::kOfBoth ? 2 : 1);
    const Number* from = static_cast<const Number*>(p.vectors[kInput]) + (Operand::kOfAllRows ? 0 : group * columns);
    if constexpr (Operand::kOfBoth && kNarrow) {
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers.values[i] = from[gate_column(column + i, p.block)];
    } else {
      numbers = read_vector<Number, 8>(from + (Operand::kOfBoth ? gate_column(column, p.block) : column));
    }
    others.fetch(p, group, column);
  }
  // Numbers of 16 bits take twice the registers once they are converted, which the compiler now cannot do earlier.
  DEVICE void stay_as_stored() {
    if constexpr (sizeof(Number) == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(&numbers)[i]));
    }
    others.stay_as_stored();
  }
  template <int kCount>
  DEVICE void convert_to(ColumnFloats<kCount>& floats) const {
    convert(floats.of[kInput], numbers);
    others.convert_to(floats);
  }
};

// All numbers that a function reads in one of the eight columns: the scale of the row, numbers of the column and of the
// element.
template <int kCount, int kMatrices = 0>
struct FunctionNumbers {
  float values[1 + kCount + kMatrices];

  DEVICE FunctionNumbers(float scale, const ColumnFloats<kCount>& columns, const ColumnFloats<kMatrices>& elements,
                         int i) {
    values[0] = scale;
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[1 + j] = columns.of[j][i];
#pragma unroll
    for (int j = 0; j < kMatrices; ++j) values[1 + kCount + j] = elements.of[j][i];
  }
};

// Stores the partial sums of the gradients of column numbers, over a block of 64 rows. A lane sums every fourth row;
// lanes eight apart have the same columns. Each stores two columns.
template <int kCount>
DEVICE void store_dvector_partials(const ActivationParams& p, const ColumnFloats<kCount>& sums, int64_t block,
                                   int column, int lane) {
  const bool of_end = lane & 16, of_last = lane & 8;
  const int64_t blocks = p.shape.tokens / 64 + p.shape.sizes.groups;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float (&sum)[8] = sums.of[j];
    float half[4], quarter[2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      half[i] = (of_end ? sum[4 + i] : sum[i]) + __shfl_xor_sync(~0u, of_end ? sum[i] : sum[4 + i], 16);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      quarter[i] = (of_last ? half[2 + i] : half[i]) + __shfl_xor_sync(~0u, of_last ? half[i] : half[2 + i], 8);
    float* to = p.dvector_partials + (j * blocks + block) * p.columns + column + of_end * 4 + of_last * 2;
    if (column < p.columns) *reinterpret_cast<float2*>(to) = {quarter[0], quarter[1]};
  }
}

}  // namespace fusible
