// What the slabs of columns of a row add to one number each, summed in a fixed order.
#include <cuda_runtime.h>

#include "device/activation.cuh"
#include "fusible/error.h"
#include "kernels/activation_entry.h"
#include "kernels/rows_of_groups.cuh"

namespace fusible {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sum_shares_kernel(const float* shares, int count, int64_t tokens, const SplitSizes sizes, void* out, DType type) {
  const int64_t rows = rows_of_groups(sizes, tokens);
  const int64_t token = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (token >= tokens) return;
  float sum = 0.f;
  for (int i = 0; token < rows && i < count; ++i) sum += shares[i * tokens + token];
  write_number(out, type, token, sum);
}

}  // namespace

void sum_shares(const float* shares, int count, int64_t tokens, const SplitSizes& sizes, void* out, DType type, cudaStream_t stream) {
  const int64_t blocks = (tokens + kThreads - 1) / kThreads;
  sum_shares_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(shares, count, tokens, sizes, out, type);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "sum of ", count, " shares for ", tokens, " tokens");
}

}  // namespace fusible
