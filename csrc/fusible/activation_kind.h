// SPDX-License-Identifier: Apache-2.0
// The activation of a kernel and the scales of its rows, for host and device. No CUDA here.
#pragma once
#include <cstdint>

#include "fusible/dtype.h"

namespace fusible {

// In the order of CURVES in ops/programs/activations.py.
enum class Curve { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4, kSigmoid = 5 };

// act(gate) * (up + linear_offset), or act(x) if not gated. For a user's function, `kernels` holds its compiled
// kernels, and only `gated` and `block` count.
struct Activation {
  Curve curve;
  bool gated;
  float alpha;  // the slope inside silu
  float limit;  // gate <= limit, |up| <= limit; infinity for none
  float linear_offset;
  int64_t block;       // columns of gate before as many of up
  int64_t kernels[3];  // handles of the kernels for kFunctionVariants or kBackwardVariants, in order; else zero
};

// A number for each row; null for ones.
struct RowScale {
  const void* data;
  DType type;
};

inline constexpr int kColumnInputs = 8;

// Numbers of columns that a user's function reads, an address for each: [groups, columns] or, of all rows, [columns];
// of gate and up among twice as many. Dense and aligned to 16 bytes.
struct ColumnVectors {
  const void* data[kColumnInputs];
  int count;
};

// The destination of the gradients of an input with numbers of columns, summed over the rows of each group, or over
// all.
struct DVector {
  void* data;  // [groups or 1, columns]; the columns of one of them if gate and up alternate
  DType type;
  bool of_both, of_all_rows;
};

}  // namespace fusible
