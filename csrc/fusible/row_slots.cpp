// SPDX-License-Identifier: Apache-2.0
#include "fusible/row_slots.h"

#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_launch.h"
#include "kernels/gemm/slots_entry.h"

namespace fusible {

void gemm_to_slots(const GroupedGemm& wanted, const RowSlots& slots, int device, cudaStream_t stream) {
  const GroupedGemm call = as_strided(wanted);
  const GemmProblem& p = call.problem;
  check(call, device);
  FUSIBLE_CHECK(p.layout == Layout::kNT && p.operand == DType::kBFloat16 && p.output == p.operand && !p.second_k,
                "rows that go to slots are of bf16, from weights [N, K]. ", p);
  if (p.tokens == 0) return;
  const DeviceGuard guard(device);
  const int variant = kSlotsVariants[short_groups(p)];
  const GemmConfig config = choose_config(p, device_properties(device).multiprocessors, variant);
  WithRowSlots<GemmParams> params{prepare_params(call, config, stream), slots};
  launch(params, slots_entry(p.scale_bias, variant), config, p, device, stream);
}

}  // namespace fusible
