// SPDX-License-Identifier: Apache-2.0
#include "fusible/pointwise.h"

#include <algorithm>

#include "fusible/device.h"
#include "fusible/error.h"

namespace fusible {
namespace {

constexpr int kBlocksPerMultiprocessor = 8, kWarps = kPointwiseThreads / 32;  // a warp has a row

}  // namespace

void pointwise(const Pointwise& call, int device, cudaStream_t stream) {
  PointwiseParams params = call.params;
  FUSIBLE_CHECK(std::ssize(call.constants) <= kPointwiseConstants, "takes at most ", kPointwiseConstants,
                " constants, got ", call.constants.size());
  std::ranges::copy(call.constants, params.constants);
  if (!params.rows || !params.columns) return;
  const DeviceGuard guard(device);
  const KernelEntry kernel = entry_of(call.function, kPointwiseThreads);
  const int64_t blocks = std::min<int64_t>((params.rows + kWarps - 1) / kWarps,
                                           kBlocksPerMultiprocessor * device_properties(device).multiprocessors);
  FUSIBLE_CUDA_CHECK(launch(kernel, blocks, stream, params), "pointwise function of ", params.rows, " rows of ",
                     params.columns, " columns");
}

}  // namespace fusible
