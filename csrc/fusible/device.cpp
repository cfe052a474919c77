// SPDX-License-Identifier: Apache-2.0
#include "fusible/device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "fusible/error.h"

namespace fusible {
namespace {

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  FUSIBLE_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device), "device ", device);
  return value;
}

DeviceProperties query(int device) {
  int count = 0;
  FUSIBLE_CUDA_CHECK(cudaGetDeviceCount(&count), "looking for device ", device);
  FUSIBLE_CHECK(device >= 0 && device < count, "there is no CUDA device ", device, "; this process sees ", count);
  cudaDeviceProp properties{};
  FUSIBLE_CUDA_CHECK(cudaGetDeviceProperties(&properties, device), "device ", device);
  DeviceProperties found{.major = properties.major,
                         .minor = properties.minor,
                         .multiprocessors = properties.multiProcessorCount,
                         .shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
  std::ranges::copy(properties.name, found.name);
  return found;
}

}  // namespace

int cuda_version() { return CUDART_VERSION; }

const DeviceProperties& device_properties(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceProperties> cache;  // a map: references stay valid as it grows
  const std::lock_guard lock(mutex);
  const auto cached = cache.find(device);
  return cached != cache.end() ? cached->second : cache.emplace(device, query(device)).first->second;
}

int current_device() {
  int device = 0;
  FUSIBLE_CUDA_CHECK(cudaGetDevice(&device), "current device");
  return device;
}

DeviceGuard::DeviceGuard(int device) : previous_(current_device()), device_(device) {
  // Also where it is current already: a fresh thread has no context until then, and encoding a tensor map needs one.
  FUSIBLE_CUDA_CHECK(cudaSetDevice(device_), "device ", device_);
}
DeviceGuard::~DeviceGuard() {
  if (device_ != previous_) (void)cudaSetDevice(previous_);
}

}  // namespace fusible
