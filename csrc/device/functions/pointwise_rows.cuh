// SPDX-License-Identifier: Apache-2.0
// A pointwise function over dense rows, without a product before it. A warp has a row, and sums the gradients of the
// row's numbers. Lanes walk the columns in vectors.
#pragma once
#include "device/functions/pointwise.cuh"
#include "device/gemm/groups.cuh"
#include "device/ptx/vector.cuh"
#include "device/rows/rows.cuh"
#include "fusible/pointwise_params.h"

namespace fusible {

// The group of a row, by a warp; -1 past the last one.
DEVICE int group_of_row(const SplitSizes& s, int64_t rows, int64_t row) {
  if (!s.sizes) return 0;
  const int lane = threadIdx.x % 32;
  int64_t before = 0;
  for (int first = 0; first < s.groups; first += 32) {
    const GroupRows<int64_t> group = rows_of_lane(s, first + lane, rows, before, lane);
    const unsigned lanes = __ballot_sync(~0u, row >= group.start && row < group.start + group.size);
    if (lanes) return first + __ffs(lanes) - 1;
  }
  return -1;
}

// The inputs of a row. Inputs: the types of the numbers of rows, columns and elements.
template <class F, class Inputs>
struct PointwiseRow {
  static constexpr int kOperands = F::kRows + F::kColumns + F::kMatrices + F::kConstants;
  static constexpr int kCount = kOperands ? kOperands : 1;
  static constexpr int kFirstMatrix = F::kRows + F::kColumns, kFirstConstant = kFirstMatrix + F::kMatrices;
  static constexpr int kVectors = F::kColumns + F::kMatrices;  // which differ by column

  DEVICE PointwiseRow(const PointwiseParams& p, int64_t row)
      : params(p), number(row), first(row * p.columns), first_of_both(first * 2) {
    if constexpr (F::kColumns > 0) group = group_of_row(p.sizes, p.rows, row);
    Inputs::Numbers::each([&]<class T>(int i) INLINE {
      r[i] = p.numbers[i] ? static_cast<float>(static_cast<const T*>(p.numbers[i])[row]) : 0.f;
    });
#pragma unroll
    for (int i = 0; i < F::kConstants; ++i) r[kFirstConstant + i] = p.constants[i];
  }
  // Loads the numbers of neighbouring columns and of their elements; zeros past the last group. `gate`: the position of
  // column `column` among those of gate and up.
  template <int kVector>
  DEVICE void load_vectors(float (&b)[kVectors ? kVectors : 1][kVector], unsigned column, unsigned gate) const {
    Inputs::Columns::each([&]<class C>(int j) INLINE {
      const int64_t of = C::kOfAllRows ? 0 : group, columns = int64_t{params.columns} * (C::kOfBoth ? 2 : 1);
      if (params.vectors[j] && of >= 0)
        load(b[j],
             static_cast<const typename C::Number*>(params.vectors[j]) + of * columns + (C::kOfBoth ? gate : column));
    });
    Inputs::Matrices::each([&]<class M>(int j) INLINE {
      if (params.matrices[j]) load(b[F::kColumns + j], at<M>(params.matrices[j], column, gate));
    });
  }
  // Everything but x and u that the function reads in column `i` of a vector.
  template <int kVector>
  DEVICE void read(float (&all)[kCount], const float (&b)[kVectors ? kVectors : 1][kVector], int i) const {
#pragma unroll
    for (int j = 0; j < kOperands; ++j)
      all[j] = j >= F::kRows && j < kFirstConstant ? b[kVectors ? j - F::kRows : 0][i] : r[j];
  }
  // Stores the gradients of columns and matrices that backward_rows computed.
  template <int kVector>
  DEVICE void store_vectors(const float (&b)[kVectors ? kVectors : 1][kVector], unsigned column, unsigned gate) const {
    Inputs::Columns::each([&]<class C>(int j) INLINE {
      if (params.dcolumns[j]) store(params.dcolumns[j] + (C::kOfBoth ? first_of_both + gate : first + column), b[j]);
    });
    Inputs::Matrices::each([&]<class M>(int j) INLINE {
      if (params.dmatrices[j]) store(at<M>(params.dmatrices[j], column, gate), b[F::kColumns + j]);
    });
  }

  const PointwiseParams& params;
  int64_t number, first, first_of_both;  // the row; elements
  int group = 0;
  float r[kCount];

 private:
  template <class M>
  DEVICE const typename M::Number* at(const void* matrix, unsigned column, unsigned gate) const {
    return static_cast<const typename M::Number*>(matrix) + (M::kOfBoth ? first_of_both + gate : first + column);
  }
  template <class M>
  DEVICE typename M::Number* at(void* matrix, unsigned column, unsigned gate) const {
    return const_cast<typename M::Number*>(at<M>(static_cast<const void*>(matrix), column, gate));
  }
};

template <class Numbers_, class Columns_, class Matrices_>
struct PointwiseInputs {
  using Numbers = Numbers_;
  using Columns = Columns_;
  using Matrices = Matrices_;
};

// Whether vectors of 16 bytes are all aligned, and each is within one block.
template <class T, class F>
DEVICE bool rows_have_vectors(const PointwiseParams& p) {
  const auto bits = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  uintptr_t all = bits(p.x) | bits(p.dy) | bits(p.y) | bits(p.dx);
#pragma unroll
  for (int j = 0; j < F::kColumns; ++j) all |= bits(p.vectors[j]) | bits(p.dcolumns[j]);
#pragma unroll
  for (int j = 0; j < F::kMatrices; ++j) all |= bits(p.matrices[j]) | bits(p.dmatrices[j]);
  return all % 16 == 0 && (p.columns | p.block) % (16 / sizeof(T)) == 0;
}

template <class T, class F, class Inputs, int kVector>
DEVICE void forward_rows(const PointwiseParams& p) {
  each_row_of_warp<kPointwiseThreads / 32>(p.rows, [&](int64_t number) INLINE {
    using Row = PointwiseRow<F, Inputs>;
    const Row row(p, number);
    const T* from = static_cast<const T*>(p.x) + (F::kGated ? row.first_of_both : row.first);
    T* to = static_cast<T*>(p.y) + row.first;
#pragma unroll 2
    for (unsigned column = threadIdx.x % 32 * kVector; column < p.columns; column += 32 * kVector) {
      float x[kVector], u[kVector] = {};
      const unsigned at = F::kGated ? gate_column(column, p.block) : column;
      load(x, from + at);
      if constexpr (F::kGated) load(u, from + at + p.block);
      float b[Row::kVectors ? Row::kVectors : 1][kVector] = {}, r[Row::kCount];
      row.load_vectors(b, column, at);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        row.read(r, b, i);
        x[i] = F::forward(x[i], u[i], r);
      }
      store(to + column, x);
    }
  });
}

// `x` may be null where no gradient reads it.
template <class T, class F, class Inputs, int kVector>
DEVICE void backward_rows(const PointwiseParams& p) {
  each_row_of_warp<kPointwiseThreads / 32>(p.rows, [&](int64_t number) INLINE {
    using Row = PointwiseRow<F, Inputs>;
    const Row row(p, number);
    const int64_t first_of_x = F::kGated ? row.first_of_both : row.first;
    const T *from = static_cast<const T*>(p.x) + first_of_x, *above = static_cast<const T*>(p.dy) + row.first;
    T* to = static_cast<T*>(p.dx) + first_of_x;
    float sums[F::kRows ? F::kRows : 1] = {};
    for (unsigned column = threadIdx.x % 32 * kVector; column < p.columns; column += 32 * kVector) {
      float x[kVector] = {}, u[kVector] = {}, dy[kVector];
      const unsigned at = F::kGated ? gate_column(column, p.block) : column;
      if (p.x) load(x, from + at);
      if constexpr (F::kGated)
        if (p.x) load(u, from + at + p.block);
      load(dy, above + column);
      float b[Row::kVectors ? Row::kVectors : 1][kVector] = {}, r[Row::kCount];
      row.load_vectors(b, column, at);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        row.read(r, b, i);
        const auto d = F::backward(x[i], u[i], r, dy[i]);
        x[i] = d.dx, u[i] = d.du;
#pragma unroll
        for (int j = 0; j < F::kRows; ++j) sums[j] += d.dr[j];
#pragma unroll
        for (int j = 0; j < Row::kVectors; ++j) b[j][i] = d.dr[F::kRows + j];
      }
      row.store_vectors(b, column, at);
      if (p.dx) {
        store(to + at, x);
        if constexpr (F::kGated) store(to + at + p.block, u);
      }
    }
    Inputs::Numbers::each([&]<class N>(int j) INLINE {
      for (int offset = 16; offset; offset /= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], offset);
      if (p.dnumbers[j] && threadIdx.x % 32 == 0) static_cast<N*>(p.dnumbers[j])[number] = static_cast<N>(sums[j]);
    });
  });
}

template <class T, class F, class Inputs>
DEVICE void pointwise_forward(const PointwiseParams& p) {
  if (rows_have_vectors<T, F>(p)) forward_rows<T, F, Inputs, 16 / sizeof(T)>(p);
  else forward_rows<T, F, Inputs, 1>(p);
}

template <class T, class F, class Inputs>
DEVICE void pointwise_backward(const PointwiseParams& p) {
  if (rows_have_vectors<T, F>(p)) backward_rows<T, F, Inputs, 16 / sizeof(T)>(p);
  else backward_rows<T, F, Inputs, 1>(p);
}

}  // namespace fusible
