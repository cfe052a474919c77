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
  uintptr_t addresses[kCapacity];  // unused entries are not read
  bool used;

  explicit MatrixTable(std::span<const uintptr_t> from) : used(!from.empty()) { std::ranges::copy(from, addresses); }
  // The matrix of a group; if the table is not used, the weight of the call is one tensor.
  template <class T, class Call>
  DEVICE const T* matrix(const Call& c, int64_t group) const {
    return used ? reinterpret_cast<const T*>(addresses[group])
                : static_cast<const T*>(c.weight) + group * c.group_stride;
  }
};

}  // namespace fusible
