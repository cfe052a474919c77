// SPDX-License-Identifier: Apache-2.0
// A pointwise function over dense rows, for one that follows no product. A warp has a row, whose gradients of the row's
// numbers it sums. Lanes walk the columns in vectors.
#pragma once
#include "device/pointwise.cuh"
#include "device/vector.cuh"

namespace fusible {

// Null: not wanted. With an up half, x and dx have twice the columns: blocks of gate and of up alternate.
struct PointwiseParams {
  int64_t rows;
  unsigned columns, block;  // of y; columns of gate before as many of up
  const void *x, *dy;
  void *y, *dx;
  const float* numbers;  // [kRows, rows]
  float* dnumbers;
};

template <class F>
struct PointwiseRow {
  static constexpr int kCount = F::kRows ? F::kRows : 1;

  DEVICE PointwiseRow(const PointwiseParams& p, int64_t row)
      : first(row * p.columns), first_of_x(first * (F::kGated ? 2 : 1)) {
#pragma unroll
    for (int i = 0; i < F::kRows; ++i) r[i] = p.numbers ? p.numbers[i * p.rows + row] : 0.f;
  }
  // Where the gate of a column stands in the row; its up stands `block` columns further.
  DEVICE static unsigned gate_column(unsigned column, unsigned block) {
    return F::kGated && column >= block ? column / block * 2 * block + column % block : column;
  }

  int64_t first, first_of_x;  // elements
  float r[kCount];
};

template <class Body>
DEVICE void each_row_of_warp(int64_t rows, Body body) {
  const int64_t warps = blockDim.x / 32;
  for (int64_t row = blockIdx.x * warps + threadIdx.x / 32; row < rows; row += gridDim.x * warps) body(row);
}

template <class T, class F, int kVector>
DEVICE void pointwise_forward(const PointwiseParams& p) {
  each_row_of_warp(p.rows, [&](int64_t number) INLINE {
    const PointwiseRow<F> row(p, number);
    const T* from = static_cast<const T*>(p.x) + row.first_of_x;
    T* to = static_cast<T*>(p.y) + row.first;
#pragma unroll 2
    for (unsigned column = threadIdx.x % 32 * kVector; column < p.columns; column += 32 * kVector) {
      float x[kVector], u[kVector] = {};
      const unsigned at = row.gate_column(column, p.block);
      load(x, from + at);
      if constexpr (F::kGated) load(u, from + at + p.block);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = F::forward(x[i], u[i], row.r);
      store(to + column, x);
    }
  });
}

// `x` may be null where no gradient reads it.
template <class T, class F, int kVector>
DEVICE void pointwise_backward(const PointwiseParams& p) {
  each_row_of_warp(p.rows, [&](int64_t number) INLINE {
    const PointwiseRow<F> row(p, number);
    const T *from = static_cast<const T*>(p.x) + row.first_of_x, *above = static_cast<const T*>(p.dy) + row.first;
    T* to = static_cast<T*>(p.dx) + row.first_of_x;
    float sums[PointwiseRow<F>::kCount] = {};
    for (unsigned column = threadIdx.x % 32 * kVector; column < p.columns; column += 32 * kVector) {
      float x[kVector] = {}, u[kVector] = {}, dy[kVector];
      const unsigned at = row.gate_column(column, p.block);
      if (p.x) load(x, from + at);
      if constexpr (F::kGated)
        if (p.x) load(u, from + at + p.block);
      load(dy, above + column);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const auto d = F::backward(x[i], u[i], row.r, dy[i]);
        x[i] = d.dx, u[i] = d.du;
#pragma unroll
        for (int j = 0; j < F::kRows; ++j) sums[j] += d.dr[j];
      }
      if (p.dx) {
        store(to + at, x);
        if constexpr (F::kGated) store(to + at + p.block, u);
      }
    }
#pragma unroll
    for (int j = 0; j < F::kRows; ++j) {
      for (int offset = 16; offset; offset /= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], offset);
      if (p.dnumbers && threadIdx.x % 32 == 0) p.dnumbers[j * p.rows + number] = sums[j];
    }
  });
}

}  // namespace fusible
