// SPDX-License-Identifier: Apache-2.0
// Philox 4x32-10 (Salmon et al., 2011): random numbers by counter, as ops/formats/random.py defines them.
#pragma once
#include "device/ptx/ptx.cuh"

namespace fusible {

struct PhiloxKey {
  uint32_t low, high;

  DEVICE explicit PhiloxKey(uint64_t seed) : low(static_cast<uint32_t>(seed)), high(seed >> 32) {}
};

DEVICE uint4 philox(uint4 c, PhiloxKey key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t{0xD2511F53u} * c.x, q = uint64_t{0xCD9E8D57u} * c.z;
    c = {static_cast<uint32_t>(q >> 32) ^ c.y ^ key.low, static_cast<uint32_t>(q),
         static_cast<uint32_t>(p >> 32) ^ c.w ^ key.high, static_cast<uint32_t>(p)};
    key.low += 0x9E3779B9u, key.high += 0xBB67AE85u;
  }
  return c;
}

}  // namespace fusible
