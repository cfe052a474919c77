// SPDX-License-Identifier: Apache-2.0
// What is asked of hundreds of tensors at every call: in Python, calling a function for each costs most of the time.
#pragma once
#include <pybind11/pybind11.h>

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

// The addresses of the data of tensors; `function` is that of torch which tells one.
inline Addresses addresses_of(const py::sequence& tensors, Address function) {
  const auto address_of = reinterpret_cast<void* (*)(PyObject*)>(function);
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "tensors: expected a sequence"));
  if (!fast) throw py::error_already_set();
  Addresses addresses(PySequence_Fast_GET_SIZE(fast.ptr()));
  for (size_t i = 0; i < addresses.size(); ++i)
    addresses[i] = reinterpret_cast<Address>(address_of(PySequence_Fast_GET_ITEM(fast.ptr(), i)));
  return addresses;
}

// The same one after the other, to be compared.
inline py::bytes tensor_addresses(const py::sequence& tensors, Address function) {
  const Addresses addresses = addresses_of(tensors, function);
  return {reinterpret_cast<const char*>(addresses.data()), addresses.size() * sizeof(Address)};
}

}  // namespace fusible::python
