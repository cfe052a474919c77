// SPDX-License-Identifier: Apache-2.0
// Python functions whose arguments are keywords: one for each field of a struct (fusible/fields.h), which is filled in
// place. Keywords are compared by address, in the order in which the struct declares them first, so that they cost
// no more than positions.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fusible/launches.h"

namespace fusible::python {

namespace py = pybind11;

// The type of a field in Python, as `ops/_C.pyi` declares it.
inline const char* python_type(Field::Type type) {
  switch (type) {
    case Field::Type::kBool: return "bool";
    case Field::Type::kFloat: return "float";
    case Field::Type::kActivation: return "Activation";
    case Field::Type::kConstants: return "tuple[float, ...]";
    case Field::Type::kAddresses:
    case Field::Type::kNumbers: return "list[int]";
    default: return "int";
  }
}

// Puts Python's values into the fields of a call.
class FieldReader {
 public:
  FieldReader(const char* function, void* call) : function_(function), call_(call) {}

  void read(const Field& field, PyObject* value) const {
    switch (field.type) {
      case Field::Type::kAddress:
      case Field::Type::kStream: return field.set(call_, address(field, value));
      case Field::Type::kInt32: {
        const int64_t number = integer(field, value);
        check(field, value, number == static_cast<int32_t>(number));
        return field.set(call_, static_cast<int32_t>(number));
      }
      case Field::Type::kInt64: return field.set(call_, integer(field, value));
      case Field::Type::kBool: return field.set<bool>(call_, integer(field, value));
      case Field::Type::kFloat: return field.set(call_, number(field, value));
      case Field::Type::kAddresses:
        return read_items<Addresses>(field, value, PyList_Check(value), &FieldReader::address);
      case Field::Type::kNumbers: return read_items<Numbers>(field, value, PyList_Check(value), &FieldReader::integer);
      case Field::Type::kConstants:
        return read_items<Constants>(field, value, PyTuple_Check(value), &FieldReader::number);
      case Field::Type::kActivation: {
        const Fields& parts = Fields::of<ActivationFields>();
        check(field, value, PyTuple_Check(value) && PyTuple_GET_SIZE(value) == std::ssize(parts.all));
        const FieldReader reader(function_, field.at(call_));
        for (size_t i = 0; i < parts.all.size(); ++i) reader.read(parts.all[i], PyTuple_GET_ITEM(value, i));
      }
    }
  }

 private:
  void check(const Field& field, PyObject* value, bool fits) const {
    if (fits && !PyErr_Occurred()) return;
    PyErr_Clear();
    throw py::type_error(std::string(function_) + ": " + field.name + ": does not take " +
                         py::repr(value).cast<std::string>());
  }
  int64_t integer(const Field& field, PyObject* value) const {
    const int64_t number = PyLong_AsLongLong(value);
    check(field, value, number != -1 || !PyErr_Occurred());
    return number;
  }
  Address address(const Field& field, PyObject* value) const {
    const Address number = PyLong_AsUnsignedLongLong(value);
    check(field, value, number != static_cast<Address>(-1) || !PyErr_Occurred());
    return number;
  }
  float number(const Field& field, PyObject* value) const {
    const float number = static_cast<float>(PyFloat_AsDouble(value));
    check(field, value, true);
    return number;
  }
  template <class Items, class Read>
  void read_items(const Field& field, PyObject* value, bool fits, Read read) const {
    check(field, value, fits);
    Items& items = field.in<Items>(call_);
    items.resize(PySequence_Fast_GET_SIZE(value));
    for (size_t i = 0; i < items.size(); ++i) items[i] = (this->*read)(field, PySequence_Fast_GET_ITEM(value, i));
  }

  const char* function_;
  void* call_;
};

// The keywords of a call: its fields.
class Signature {
 public:
  template <class Call>
  static const Signature& of() {
    static const auto* const signature = new Signature(Fields::of<Call>());  // never freed: its names are Python's
    return *signature;
  }
  explicit Signature(const Fields& fields) : fields_(fields), required_(std::min(fields.required, fields.all.size())) {
    FUSIBLE_CHECK(fields.all.size() <= kMost, "at most ", kMost, " keywords");
    for (const Field& field : fields.all) names_.push_back(PyUnicode_InternFromString(field.name.c_str()));
  }

  // Reads the values into a call; what is left out stays.
  void read(const char* function, PyObject* const* values, PyObject* keywords, void* call) const {
    std::array<bool, kMost> read{};
    const FieldReader reader(function, call);
    const size_t count = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (size_t i = 0, next = 0; i < count; ++i, ++next) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, i);
      if (next >= names_.size() || names_[next] != keyword) next = position(function, keyword);
      reader.read(fields_.all[next], values[i]);
      read[next] = true;
    }
    for (size_t i = 0; i < required_; ++i)
      if (!read[i]) throw py::type_error(std::string(function) + ": needs " + fields_.all[i].name);
  }

  // With or without types, which `inspect` does not read.
  std::string text(bool typed) const {
    std::string text = "(*";
    for (size_t i = 0; i < names_.size(); ++i) {
      const Field& field = fields_.all[i];
      text += ", " + field.name + (typed ? std::string(": ") + python_type(field.type) : "");
      text += i < required_ ? "" : typed ? " = ..." : "=...";
    }
    return text + ")";
  }

 private:
  static constexpr size_t kMost = 64;

  size_t position(const char* function, PyObject* keyword) const {
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i] == keyword || PyUnicode_Compare(names_[i], keyword) == 0) return i;
    throw py::type_error(std::string(function) + ": takes no " + PyUnicode_AsUTF8(keyword));
  }

  const Fields& fields_;
  size_t required_;
  std::vector<PyObject*> names_;
};

template <class Call>
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  try {
    if (positional) throw py::type_error(std::string(Call::kName) + ": takes keywords alone");
    Call launch;
    Signature::of<Call>().read(Call::kName, values, keywords, &launch);
    if constexpr (requires { launch.bytes(); }) {
      if (Capture* capture = Capture::active()) capture->asked(launch);
      return PyLong_FromLongLong(allocated_bytes(launch));
    } else {
      launch_now(launch);
      Py_RETURN_NONE;
    }
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::type_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Defines the function of a launch or of a workspace, and says in `declarations` how `ops/_C.pyi` declares it.
template <class Call>
void def(py::module_& module, const char* text) {
  static const std::string documentation = Call::kName + Signature::of<Call>().text(false) + "\n--\n\n" + text;
  static PyMethodDef method{Call::kName, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<Call>)),
                            METH_FASTCALL | METH_KEYWORDS, documentation.c_str()};
  module.attr(Call::kName) = py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, nullptr, nullptr));
  if (!py::hasattr(module, "declarations")) module.attr("declarations") = py::dict();
  constexpr bool counts_bytes = requires(Call call) { call.bytes(); };
  module.attr("declarations")[Call::kName] =
      Signature::of<Call>().text(true) + " -> " + (counts_bytes ? "int" : "None");
}

}  // namespace fusible::python
