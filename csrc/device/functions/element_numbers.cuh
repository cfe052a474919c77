// SPDX-License-Identifier: Apache-2.0
// The element operands of a user's function besides the product, such as a residual that it adds.
#pragma once
#include "device/epilogue/epilogue_vectors.cuh"
#include "device/functions/column_numbers.cuh"

namespace fusible {

// A lane's eight neighbouring columns of a row, for each matrix, in the stored types. Operands: their types,
// MatrixOperand; their addresses follow those of kInput numbers of columns.
template <class Operands, int kInput>
struct ElementNumbers {
  static constexpr int kBytes = 0;  // of a vector of each matrix
  DEVICE void fetch(const ActivationParams&, int64_t, int) {}
  template <int kCount>
  DEVICE void convert_to(ColumnFloats<kCount>&, int = 0) const {}
};
template <class Operand, class... Others, int kInput>
struct ElementNumbers<Types<Operand, Others...>, kInput> {
  using Number = typename Operand::Number;
  Vector<Number, 8> numbers;
  ElementNumbers<Types<Others...>, kInput + 1> others;
  static constexpr int kBytes = 8 * sizeof(Number) + decltype(others)::kBytes;

  DEVICE void fetch(const ActivationParams& p, int64_t row, int column) {
    const Number* from = static_cast<const Number*>(p.vectors[kInput]);
    if constexpr (Operand::kOfBoth) from += row * 2 * p.columns + gate_vector_column(column, p.block);
    else from += row * p.columns + column;
    numbers = read_vector<Number, 8>(from);
    others.fetch(p, row, column);
  }
  template <int kCount>
  DEVICE void convert_to(ColumnFloats<kCount>& floats, int i = 0) const {
    convert(floats.of[i], numbers);
    others.convert_to(floats, i + 1);
  }
};

}  // namespace fusible
