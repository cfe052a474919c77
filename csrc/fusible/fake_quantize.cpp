// SPDX-License-Identifier: Apache-2.0
#include "fusible/fake_quantize.h"

#include "fusible/device.h"
#include "fusible/error.h"
#include "kernels/quantize/fake_quantize_launch.h"

namespace fusible {

void fake_quantize_rows(const FakeQuantizeRows& c, int device, cudaStream_t stream) {
  if (!c.tokens || !c.features || !c.sizes.groups) return;
  const DeviceGuard guard(device);
  c.format == ScaledFormat::kMXFP8 ? fake_quantize_mx_rows(c, stream) : fake_quantize_nv_rows(c, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "quantising ", c.tokens, " rows of ", c.features, " features, ",
                     c.sizes.groups, " groups");
}

void fake_quantize_weight(const FakeQuantizeWeight& c, int device, cudaStream_t stream) {
  if (!c.groups || !c.n || !c.k) return;
  const DeviceGuard guard(device);
  c.format == ScaledFormat::kMXFP8 ? fake_quantize_mx_weight(c, stream) : fake_quantize_nv_weight(c, stream);
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "quantising ", c.groups, " matrices of ", c.n, " x ", c.k);
}

}  // namespace fusible
