#include <algorithm>

#include "kernels/prepare.h"

namespace fusible {
namespace {

constexpr int kThreads = 128;

template <int kCapacity>
struct Tables {
  Place places[kCapacity];
  uintptr_t biases[kCapacity];
};

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const Workspace to, const __grid_constant__ Tables<kCapacity> from, int places, int biases) {
  for (int g = threadIdx.x; g < places; g += kThreads) to.places[g] = from.places[g];
  for (int g = threadIdx.x; g < biases; g += kThreads) to.biases[g] = reinterpret_cast<const void*>(from.biases[g]);
}

template <int kCapacity>
cudaError_t launch(const Workspace& to, std::span<const Place> places, std::span<const uintptr_t> biases,
                   cudaStream_t stream) {
  Tables<kCapacity> tables;  // what is not filled is not read
  std::ranges::copy(places, tables.places);
  std::ranges::copy(biases, tables.biases);
  prepare_kernel<kCapacity>
      <<<1, kThreads, 0, stream>>>(to, tables, static_cast<int>(places.size()), static_cast<int>(biases.size()));
  return cudaGetLastError();
}

constexpr int64_t kCounterBytes = 16;  // keeps the tables aligned

}  // namespace

int64_t bytes_of_workspace(int64_t groups) {
  return kCounterBytes + groups * static_cast<int64_t>(sizeof(Place) + sizeof(void*));
}

Workspace lay_out(void* memory, int64_t groups) {
  char* bytes = static_cast<char*>(memory);
  const auto places = reinterpret_cast<Place*>(bytes + kCounterBytes);
  return {.counter = reinterpret_cast<unsigned*>(bytes),
          .places = places,
          .biases = reinterpret_cast<const void**>(places + groups)};
}

cudaError_t prepare(const Workspace& to, std::span<const Place> places, std::span<const uintptr_t> biases,
                    cudaStream_t stream) {
  return std::max(places.size(), biases.size()) <= 64 ? launch<64>(to, places, biases, stream)
                                                      : launch<kMaxGroups>(to, places, biases, stream);
}

}  // namespace fusible
