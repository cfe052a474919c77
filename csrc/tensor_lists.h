// SPDX-License-Identifier: Apache-2.0
// What is asked of hundreds of tensors at every call: in Python, calling a function for each costs most of the time.
#pragma once
#include <pybind11/pybind11.h>

#include <cstring>

#include "fusible/launches.h"

namespace fusible::python {

namespace py = pybind11;

// Whether a dictionary has these objects under these names. Objects are compared by identity.
inline bool has_objects(const py::dict& values, const py::tuple& names, const py::tuple& objects) {
  if (names.size() != objects.size()) return false;
  for (size_t i = 0; i < names.size(); ++i) {
    PyObject* value = PyDict_GetItemWithError(values.ptr(), PyTuple_GET_ITEM(names.ptr(), i));
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    if (value != PyTuple_GET_ITEM(objects.ptr(), i)) return false;
  }
  return true;
}

// The addresses of the data of tensors, one after the other; `function` is that of torch which tells one.
inline py::bytes tensor_addresses(const py::sequence& tensors, Address function) {
  const auto address_of = reinterpret_cast<void* (*)(PyObject*)>(function);
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "tensors: expected a sequence"));
  if (!fast) throw py::error_already_set();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  auto addresses = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, count * sizeof(void*)));
  if (!addresses) throw py::error_already_set();
  char* next = PyBytes_AS_STRING(addresses.ptr());
  for (Py_ssize_t i = 0; i < count; ++i, next += sizeof(void*)) {
    const void* address = address_of(PySequence_Fast_GET_ITEM(fast.ptr(), i));
    std::memcpy(next, &address, sizeof address);
  }
  return addresses;
}

}  // namespace fusible::python
