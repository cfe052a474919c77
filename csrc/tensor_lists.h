// SPDX-License-Identifier: Apache-2.0
// Queries on hundreds of tensors at every call: in Python, a function call for each would take most of the time.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

#include "fusible/launches.h"

namespace fusible::python {

namespace py = pybind11;

// Whether a dictionary has these objects under these names. Objects are compared by identity. Names that are keys of
// the dictionary, in its order, need not be looked up.
inline bool has_objects(const py::dict& values, const py::tuple& names, const py::tuple& objects) {
  if (names.size() != objects.size()) return false;
  Py_ssize_t position = 0;
  bool has_next = true;
  for (size_t i = 0; i < names.size(); ++i) {
    PyObject *name = PyTuple_GET_ITEM(names.ptr(), i), *key = nullptr, *value = nullptr;
    while (has_next && key != name) has_next = PyDict_Next(values.ptr(), &position, &key, &value);
    if (!has_next) value = PyDict_GetItemWithError(values.ptr(), name);
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    if (value != PyTuple_GET_ITEM(objects.ptr(), i)) return false;
  }
  return true;
}

// The data addresses of tensors; `function` is torch's function that returns one.
inline Addresses addresses_of(const py::sequence& tensors, Address function) {
  const auto address_of = reinterpret_cast<void* (*)(PyObject*)>(function);
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "tensors: expected a sequence"));
  if (!fast) throw py::error_already_set();
  Addresses addresses(PySequence_Fast_GET_SIZE(fast.ptr()));
  for (size_t i = 0; i < addresses.size(); ++i)
    addresses[i] = reinterpret_cast<Address>(address_of(PySequence_Fast_GET_ITEM(fast.ptr(), i)));
  return addresses;
}

// The tensors of a replay: a list of given ones, to which allocations are appended.
class ReplayTensors {
 public:
  // `memory` says of each result, and then of bytes, what allocates it and its sizes but the first.
  ReplayTensors(py::list tensors, py::list memory, Address function)
      : tensors_(std::move(tensors)), memory_(std::move(memory)), function_(function), inputs_(tensors_.size()) {}

  Addresses addresses() const { return addresses_of(tensors_, function_); }

  Address allocate(int64_t number, int64_t size) {
    const py::tuple entry = memory_[std::min<size_t>(number - inputs_, memory_.size() - 1)];
    const py::object tensor = entry[0](size, *entry[1]);
    while (static_cast<int64_t>(tensors_.size()) <= number) tensors_.append(py::none());
    tensors_[number] = tensor;
    return reinterpret_cast<Address>(reinterpret_cast<void* (*)(PyObject*)>(function_)(tensor.ptr()));
  }

  void release(int64_t number) { tensors_[number] = py::none(); }

 private:
  py::list tensors_, memory_;
  Address function_;
  size_t inputs_;
};

// The same one after the other, to be compared.
inline py::bytes tensor_addresses(const py::sequence& tensors, Address function) {
  const Addresses addresses = addresses_of(tensors, function);
  return {reinterpret_cast<const char*>(addresses.data()), addresses.size() * sizeof(Address)};
}

}  // namespace fusible::python
