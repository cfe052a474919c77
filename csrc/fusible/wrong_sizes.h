// SPDX-License-Identifier: Apache-2.0
// The report of kernels to the host on wrong split sizes, which only the device knows. Each device has one word of
// pinned memory, which kernels write and which the host reads without waiting. So it works in graphs and their replays.
#pragma once
#include <cstdint>

#include "fusible/wrong_size.h"

namespace fusible {

// The word that kernels on a device write; null for devices without one. Allocated by the first call.
uint64_t* wrong_size_word(int device);

// Throws fusible::Error if a kernel on the device has reported a size since the last call, for this call alone. Waits
// for no kernel.
void raise_wrong_sizes(int device);

}  // namespace fusible
