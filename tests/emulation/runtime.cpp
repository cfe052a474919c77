// The few calls of the CUDA runtime that csrc makes, for one device that is this process.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "fibers.h"
#include "tensor_map.h"

namespace {
std::map<const void*, int> shared_limits;  // of kernels, where they were raised

// The emulated cuLaunchKernel: a foreign kernel is a function of the host, which is told its grid and its parameters.
CUresult call_on_host(CUfunction kernel, unsigned x, unsigned y, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void** parameters, void**) {
  if (!x || !y) return CUDA_ERROR_INVALID_VALUE;
  reinterpret_cast<void (*)(unsigned, unsigned, void**)>(kernel)(x, y, parameters);
  return CUDA_SUCCESS;
}
}  // namespace

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the emulation"; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  emulation::check(attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin, "attribute ", static_cast<int>(attribute), " is not emulated");
  *value = emulation::kSharedLimit;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulated H200");
  properties->major = 9, properties->multiProcessorCount = emulation::kMultiprocessors;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  const std::map<std::string_view, void*> entries{{"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&emulation::encode_tiled)},
                                                  {"cuLaunchKernel", reinterpret_cast<void*>(&call_on_host)}};
  const auto found = entries.find(name);
  *entry = found == entries.end() ? nullptr : found->second;
  *status = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    uint8_t* at = static_cast<uint8_t*>(to) + row * pitch;
    emulation::check_memory(reinterpret_cast<uintptr_t>(at), width, "cudaMemset2DAsync");
    std::memset(at, value, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) { return cudaMemset2DAsync(to, bytes, value, bytes, 1, stream); }

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return *memory = std::aligned_alloc(128, bytes), cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  emulation::check(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize, "function attribute ", static_cast<int>(attribute), " is not emulated");
  if (value > emulation::kSharedLimit) return cudaErrorInvalidValue;
  shared_limits[kernel] = value;
  return cudaSuccess;
}

// Kernels that are launched by their address have one parameter, a grid constant; build.py makes a reference of it.
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launch, const void* kernel, void** arguments) {
  if (launch->dynamicSmemBytes > (shared_limits.contains(kernel) ? shared_limits[kernel] : 48u << 10)) return cudaErrorInvalidValue;
  emulation::Config config{launch->gridDim, launch->blockDim, launch->dynamicSmemBytes, launch->stream};
  for (unsigned i = 0; i < launch->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = launch->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) config.cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      config.overlapped = attribute.val.programmaticStreamSerializationAllowed;
  }
  const auto run = reinterpret_cast<void (*)(const void*)>(reinterpret_cast<uintptr_t>(kernel));
  emulation::launch(config, [&] { run(arguments[0]); });
  return cudaSuccess;
}

}  // extern "C"
