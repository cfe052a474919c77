// SPDX-License-Identifier: Apache-2.0
// Buffers of XLA as operands of the kernels. All are dense, row-major; one without elements stands for an operand or a
// result that is not there.
#pragma once
#include "fusible/error.h"
#include "fusible/grouped_gemm.h"
#include "xla/platform.h"

namespace fusible::xla_ffi {

using Buffer = xla::ffi::AnyBuffer;
using Result = xla::ffi::Result<Buffer>;

inline DType type_of(const Buffer& buffer) {
  using xla::ffi::DataType;
  switch (buffer.element_type()) {
    case DataType::F32: return DType::kFloat32;
    case DataType::F16: return DType::kFloat16;
    case DataType::BF16: return DType::kBFloat16;
    default: fail("buffers must hold float32, float16 or bfloat16");
  }
}

// The size of a dimension of a buffer that must have `rank` of them.
inline int64_t size_of(const Buffer& buffer, size_t rank, size_t dimension) {
  const auto sizes = buffer.dimensions();
  FUSIBLE_CHECK(sizes.size() == rank, "a buffer must have ", rank, " dimensions, got ", sizes.size());
  return sizes[dimension];
}

inline SplitSizes split_sizes(const Buffer& sizes) {
  using xla::ffi::DataType;
  const DataType type = sizes.element_type();
  FUSIBLE_CHECK(type == DataType::S32 || type == DataType::S64, "sizes must be int32 or int64");
  return {address(sizes), static_cast<int>(size_of(sizes, 1, 0)), type == DataType::S64};
}

// Rows [T, columns], or the matrices [G, rows, columns] of the groups.
inline MatrixView matrices(const Buffer& buffer) {
  const size_t rank = buffer.dimensions().size();
  const int64_t columns = size_of(buffer, rank == 3 ? 3 : 2, rank == 3 ? 2 : 1);
  return {address(buffer), type_of(buffer), columns, rank == 3 ? columns * buffer.dimensions()[1] : 0};
}

// A vector for each group [G, columns], if it is there.
inline MatrixView vectors(const Buffer& buffer) {
  if (buffer.element_count() == 0) return {};
  return {address(buffer), type_of(buffer), size_of(buffer, 2, 1), 0};
}

inline RowScale row_scale(const Buffer& buffer) {
  return buffer.element_count() ? RowScale{address(buffer), type_of(buffer)} : RowScale{};
}

// A number for each row in fp32, if it is there.
inline const float* floats(const Buffer& buffer) {
  FUSIBLE_CHECK(buffer.element_type() == xla::ffi::DataType::F32, "factors of rows must be float32");
  return static_cast<const float*>(address(buffer));
}

// Operands and groups of a product; the output is the caller's.
inline GroupedGemm product(int64_t layout, const Buffer& a, const Buffer& b, const Buffer& sizes,
                           const Buffer& workspace) {
  GroupedGemm gemm{};
  gemm.a = matrices(a), gemm.b = matrices(b), gemm.sizes = split_sizes(sizes), gemm.workspace = address(workspace);
  GemmProblem& p = gemm.problem;
  p.layout = static_cast<Layout>(layout), p.operand = p.output = type_of(a), p.groups = gemm.sizes.groups;
  p.tokens = size_of(a, 2, 0);
  if (p.layout == Layout::kTN) {
    p.m = size_of(a, 2, 1), p.n = size_of(b, 2, 1);
    FUSIBLE_CHECK(size_of(b, 2, 0) == p.tokens, "both operands must have the same rows. ", p);
    return gemm;
  }
  p.k = size_of(a, 2, 1), p.n = size_of(b, 3, p.layout == Layout::kNT ? 1 : 2);
  FUSIBLE_CHECK(size_of(b, 3, p.layout == Layout::kNT ? 2 : 1) == p.k && size_of(b, 3, 0) == p.groups,
                "the operands do not fit to one another. ", p);
  return gemm;
}

}  // namespace fusible::xla_ffi
