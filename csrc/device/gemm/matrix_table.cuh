// SPDX-License-Identifier: Apache-2.0
// The matrices of all groups, which are one tensor or tensors of their own.
#pragma once
#include <algorithm>
#include <span>

#include "device/ptx/ptx.cuh"

namespace fusible {

// Matrices that are tensors of their own go along as arguments of the kernel: nothing of the host's is read later.
template <int kCapacity>
struct MatrixTable {
  uintptr_t addresses[kCapacity];  // what is not filled is not read
  bool used;

  explicit MatrixTable(std::span<const uintptr_t> from) : used(!from.empty()) { std::ranges::copy(from, addresses); }
  // That of a group of a call, whose weight is one tensor if this is not used.
  template <class T, class Call>
  DEVICE const T* matrix(const Call& c, int64_t group) const {
    return used ? reinterpret_cast<const T*>(addresses[group])
                : static_cast<const T*>(c.weight) + group * c.group_stride;
  }
};

}  // namespace fusible
