// SPDX-License-Identifier: Apache-2.0
#include "fusible/foreign_kernel.h"

#include <cuda.h>

#include <vector>

#include "fusible/device.h"
#include "fusible/driver_entry.h"
#include "fusible/error.h"
#include "fusible/tensor_map.h"

namespace fusible {
namespace {

// The place of a parameter, whose size the driver knows.
union Value {
  int64_t number;
  Address address;
  CUtensorMap map;
};

// Takes the next of some values.
template <class T>
class Reader {
 public:
  explicit Reader(const std::vector<T>& values) : values_(values) {}
  T next() {
    FUSIBLE_CHECK(next_ < values_.size(), "a foreign kernel has more parameters than values");
    return values_[next_++];
  }
  template <class To>
  void read(std::vector<To>& to) {
    for (To& each : to) each = static_cast<To>(next());
  }

 private:
  const std::vector<T>& values_;
  size_t next_ = 0;
};

CUtensorMap map_of(Address base, Reader<int64_t>& form) {
  const auto type = static_cast<CUtensorMapDataType>(form.next());
  const auto swizzle = static_cast<CUtensorMapSwizzle>(form.next());
  const auto promotion = static_cast<CUtensorMapL2promotion>(form.next());
  const auto fill = static_cast<CUtensorMapFloatOOBfill>(form.next());
  const int64_t rank = form.next();
  FUSIBLE_CHECK(rank > 1 && rank <= 5, "a tensor map has 2 to 5 dimensions, got ", rank);
  std::vector<uint64_t> sizes(rank), strides(rank - 1);
  std::vector<uint32_t> box(rank);
  form.read(sizes), form.read(box), form.read(strides);
  return encode_map(base, {type, swizzle, promotion, fill, sizes, strides, box});
}

}  // namespace

void launch_foreign(const ForeignKernel& kernel, int device, cudaStream_t stream) {
  static const auto launch = driver_entry<decltype(&cuLaunchKernel)>("cuLaunchKernel", 4000);
  const DeviceGuard guard(device);
  std::vector<Value> values(kernel.parameters.size());
  std::vector<void*> parameters;
  Reader<int64_t> numbers(kernel.numbers), maps(kernel.maps);
  Reader<Address> addresses(kernel.addresses);
  for (size_t i = 0; i < values.size(); ++i) {
    switch (static_cast<Parameter>(kernel.parameters[i])) {
      case Parameter::kNumber: values[i].number = numbers.next(); break;
      case Parameter::kAddress: values[i].address = addresses.next(); break;
      case Parameter::kTensorMap: values[i].map = map_of(addresses.next(), maps);
    }
    parameters.push_back(&values[i]);
  }
  const CUresult result = launch(reinterpret_cast<CUfunction>(kernel.function), static_cast<unsigned>(kernel.blocks_x),
                                 static_cast<unsigned>(kernel.blocks_y), 1, static_cast<unsigned>(kernel.threads), 1, 1,
                                 static_cast<unsigned>(kernel.shared_bytes), stream, parameters.data(), nullptr);
  FUSIBLE_CHECK(result == CUDA_SUCCESS, "a kernel of another compiler was refused with driver error ",
                static_cast<int>(result), ": grid ", kernel.blocks_x, " x ", kernel.blocks_y, ", ", kernel.threads,
                " threads, ", kernel.shared_bytes, " bytes of shared memory, ", kernel.parameters.size(),
                " parameters");
}

}  // namespace fusible
