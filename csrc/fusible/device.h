// SPDX-License-Identifier: Apache-2.0
// Properties of a GPU for the host, queried once per device. Nothing here runs at import.
#pragma once
namespace fusible {

struct DeviceProperties {
  char name[256] = "";
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int shared_memory_per_block = 0;  // bytes, with the opt-in
};

// Version of the CUDA runtime that is linked in, e.g. 13000.
int cuda_version();

// Cached; thread-safe. Throws fusible::Error if there is no such device.
const DeviceProperties& device_properties(int device);

// The device that is current in the calling thread.
int current_device();

// Makes `device` current for the lifetime of the object.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_, device_;
};

}  // namespace fusible
