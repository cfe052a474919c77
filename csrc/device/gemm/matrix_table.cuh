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
  int first = 0;  // group of the launch

  explicit MatrixTable(std::span<const uintptr_t> from) : used(!from.empty()) { std::ranges::copy(from, addresses); }
  // The matrix of a group; if the table is not used, the weight of the call is one tensor.
  template <class T, class Call>
  DEVICE const T* matrix(const Call& c, int64_t group) const {
    return used ? reinterpret_cast<const T*>(addresses[group - first])
                : static_cast<const T*>(c.weight) + group * c.group_stride;
  }
};

// body(table, its number of groups) for all groups: at once, or as many at a time as a table has room for.
template <int kCapacity, class Body>
void each_table(std::span<const uintptr_t> addresses, int64_t groups, const Body& body) {
  if (addresses.empty()) return body(MatrixTable<kCapacity>({}), groups);
  for (int64_t first = 0; first < groups; first += kCapacity) {
    const int64_t count = std::min<int64_t>(kCapacity, groups - first);
    MatrixTable<kCapacity> table(addresses.subspan(first, count));
    table.first = static_cast<int>(first);
    body(table, count);
  }
}

}  // namespace fusible
