// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "device/ptx/ptx.cuh"
#include "kernels/gemm/prepare.h"

namespace fusible {
namespace {

constexpr int kThreads = 128;

template <int kCapacity>
struct Tables {
  GroupCoordinate coordinates[kCapacity];
  uintptr_t biases[kCapacity];
};

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const Workspace to, const __grid_constant__ Tables<kCapacity> from, int coordinates, int biases) {
  ptx::let_next_kernel_begin();
  for (int g = threadIdx.x; g < coordinates; g += kThreads) to.coordinates[g] = from.coordinates[g];
  for (int g = threadIdx.x; g < biases; g += kThreads) to.biases[g] = reinterpret_cast<const void*>(from.biases[g]);
}

template <int kCapacity>
cudaError_t launch(const Workspace& to, std::span<const GroupCoordinate> coordinates, std::span<const uintptr_t> biases,
                   cudaStream_t stream) {
  Tables<kCapacity> tables;  // unused entries are not read
  std::ranges::copy(coordinates, tables.coordinates);
  std::ranges::copy(biases, tables.biases);
  prepare_kernel<kCapacity>
      <<<1, kThreads, 0, stream>>>(to, tables, static_cast<int>(coordinates.size()), static_cast<int>(biases.size()));
  return cudaGetLastError();
}

constexpr int64_t kCountersBytes = 32;  // one of each window; keeps the tables aligned
static_assert(windows_of(kMaxGroups) * sizeof(unsigned) <= kCountersBytes);

// The part of a window that begins with this group.
template <class T>
std::span<const T> part(std::span<const T> all, size_t first) {
  first = std::min(first, all.size());
  return all.subspan(first, std::min<size_t>(kGroupsOfWindow, all.size() - first));
}

// The offset of the sums of a split depth.
int64_t bytes_before_sums(int64_t groups) { return (bytes_of_workspace(groups) + 255) / 256 * 256; }
constexpr int64_t bytes_of_sums() {
  int most = 0;
  for (const TileVariant& tile : kTileVariants)
    if (tile.split_k) most = std::max(most, tile.tile_m * tile.tile_n);
  return int64_t{kMostSlicedTasks} * most * static_cast<int64_t>(sizeof(float));
}

}  // namespace

int64_t bytes_of_workspace(int64_t groups) {
  return kCountersBytes + groups * static_cast<int64_t>(sizeof(GroupCoordinate) + sizeof(void*));
}

Workspace lay_out(void* memory, int64_t groups) {
  char* bytes = static_cast<char*>(memory);
  const auto coordinates = reinterpret_cast<GroupCoordinate*>(bytes + kCountersBytes);
  return {.counter = reinterpret_cast<unsigned*>(bytes),
          .coordinates = coordinates,
          .biases = reinterpret_cast<const void**>(coordinates + groups)};
}

Workspace lay_out_split_k(void* memory, int64_t groups) {
  Workspace all = lay_out(memory, groups);
  char* sums = static_cast<char*>(memory) + bytes_before_sums(groups);
  all.split_k = {.sums = reinterpret_cast<float*>(sums),
                 .arrived = reinterpret_cast<uint32_t*>(sums + bytes_of_sums())};
  return all;
}

int64_t bytes_of_split_k(int64_t groups) {
  return bytes_before_sums(groups) + bytes_of_sums() + kArrivedCounters * static_cast<int64_t>(sizeof(uint32_t));
}

cudaError_t prepare(const Workspace& to, std::span<const GroupCoordinate> coordinates,
                    std::span<const uintptr_t> biases, cudaStream_t stream) {
  const size_t count = std::max(coordinates.size(), biases.size());
  if (count <= 64) return launch<64>(to, coordinates, biases, stream);
  cudaError_t error = cudaSuccess;
  for (size_t first = 0; first < count && error == cudaSuccess; first += kGroupsOfWindow) {
    Workspace window = to;
    window.coordinates += first, window.biases += first;
    error = launch<kGroupsOfWindow>(window, part(coordinates, first), part(biases, first), stream);
  }
  return error;
}

}  // namespace fusible
