// SPDX-License-Identifier: Apache-2.0
// Queries on hundreds of tensors at every call: in Python, a function call for each would take most of the time.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
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

// The form of a tensor as torch's guards see it, read by functions of torch: those of its C interface for compiled code
// take the address of a tensor inside of its Python object, as do `is_neg` and `is_inference`.
class TensorForm {
 public:
  // The offset of that address, then ten functions in the order in which they are asked.
  using Functions = std::array<Address, 11>;

  TensorForm(PyObject* object, const Functions& functions) {
    void* tensor = reinterpret_cast<char*>(object) + functions[0];
    const auto says = [&](size_t i, const void* of) {
      return reinterpret_cast<bool (*)(const void*)>(functions[i])(of);
    };
    is_known_ = ask(functions[1], tensor, layout_) && ask(functions[2], tensor, dtype_) &&
                ask(functions[3], tensor, device_type_) && ask(functions[4], tensor, device_index_) &&
                ask(functions[5], tensor, dims_) && ask(functions[6], tensor, sizes_) &&
                ask(functions[7], tensor, strides_);
    requires_grad_ = says(8, *static_cast<void**>(tensor));
    is_neg_ = says(9, tensor), is_inference_ = says(10, tensor);
  }

  bool operator==(const TensorForm& other) const {
    return is_known_ && other.is_known_ && layout_ == other.layout_ && dtype_ == other.dtype_ &&
           device_type_ == other.device_type_ && device_index_ == other.device_index_ && dims_ == other.dims_ &&
           requires_grad_ == other.requires_grad_ && is_neg_ == other.is_neg_ && is_inference_ == other.is_inference_ &&
           std::equal(sizes_, sizes_ + dims_, other.sizes_) && std::equal(strides_, strides_ + dims_, other.strides_);
  }

 private:
  template <class T>
  static bool ask(Address function, void* tensor, T& answer) {
    return !reinterpret_cast<int32_t (*)(void*, T*)>(function)(tensor, &answer);
  }

  int32_t layout_, dtype_, device_type_, device_index_;
  int64_t dims_;
  int64_t *sizes_, *strides_;
  bool is_known_, requires_grad_, is_neg_, is_inference_;
};

// Whether tensors have the type and the form of the first one, which is a tensor of torch's own type.
inline bool are_alike(const py::sequence& tensors, const TensorForm::Functions& functions) {
  const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "tensors: expected a sequence"));
  if (!fast) throw py::error_already_set();
  PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  if (!count) return true;
  const TensorForm first(items[0], functions);
  return std::all_of(items + 1, items + count, [&](PyObject* item) {
    return Py_TYPE(item) == Py_TYPE(items[0]) && TensorForm(item, functions) == first;
  });
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
