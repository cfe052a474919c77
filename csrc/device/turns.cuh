// SPDX-License-Identifier: Apache-2.0
// Turns of two consumers at the tensor cores: so that each adds to its accumulators what it has multiplied while the
// other one multiplies.
#pragma once
#include "device/epilogue.cuh"
#include "device/wgmma.cuh"

namespace fusible {

// A consumer may issue a unit's product when the other one's last is nearly done.
template <class K>
DEVICE void take_turn(int consumer) {
  if constexpr (K::kTurns) ptx::named_barrier_sync(1 + consumer, kConsumers * 128);
}
template <class K>
DEVICE void pass_turn(int consumer) {
  if constexpr (K::kTurns) ptx::named_barrier_arrive(1 + (consumer ^ 1), kConsumers * 128);
}

// The first one is consumer 0's.
template <class K>
DEVICE void begin_turns(int consumer) {
  if (consumer == 1) pass_turn<K>(consumer);
}

// The turn passes when kTurns of the product's steps are still to come; the last of them are a group of their own then.
template <class K, int kSteps, class Issue>
DEVICE void multiply_in_turn(int consumer, Issue issue) {
  constexpr int kLeft = K::kTurns < kSteps ? K::kTurns : 0;
  take_turn<K>(consumer);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (kLeft > 0 && step == kSteps - kLeft) wgmma_commit();
    issue(step);
  }
  wgmma_commit();
  if constexpr (kLeft > 0) wgmma_wait<1>();
  pass_turn<K>(consumer);
}

}  // namespace fusible
