// fusible.ops._C: converts Python's integers and calls the C++ core, nothing else.
#include <pybind11/pybind11.h>

#include "fusible/device.h"

namespace py = pybind11;

namespace {

py::dict device_properties(int device) {
  const fusible::DeviceProperties& properties = fusible::device_properties(device);
  py::dict result;
  result["name"] = properties.name;
  result["capability"] = py::make_tuple(properties.major, properties.minor);
  result["multiprocessors"] = properties.multiprocessors;
  result["shared_memory_per_block"] = properties.shared_memory_per_block;
  result["l2_bytes"] = properties.l2_bytes;
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CUDA kernels of fusible. Takes pointers and sizes as integers; importing it does not initialise CUDA.";
  module.def("cuda_version", &fusible::cuda_version, "Version of the CUDA runtime that is linked in, e.g. 13000.");
  module.def("device_properties", &device_properties, py::arg("device"));
}
