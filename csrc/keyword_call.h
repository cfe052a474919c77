// SPDX-License-Identifier: Apache-2.0
// Python functions whose arguments are keywords: one for each field of a struct (fusible/launches.h), which is filled
// in place. Keywords are compared by address, in the order in which the struct declares them first, so that they cost
// no more than positions.
#pragma once
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "fusible/launches.h"

namespace fusible::python {

namespace py = pybind11;

// The type of a field in Python, as `ops/_C.pyi` declares it.
template <class T>
constexpr const char* python_type() {
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, float>) return "float";
  if constexpr (std::is_same_v<T, Activation>) return "Activation";
  if constexpr (std::is_same_v<T, Constants>) return "tuple[float, ...]";
  if constexpr (std::is_same_v<T, Addresses> || std::is_same_v<T, Numbers>) return "list[int]";
  return "int";
}

// The names and types of the fields of a call.
class Signature {
 public:
  static constexpr size_t kMost = 64;

  template <class Call>
  static const Signature& of() {
    static const Signature* signature = [] {  // never freed: its names are Python's
      auto* filled = new Signature();
      Call().fields(*filled);
      filled->required_ = std::min(filled->required_, filled->names_.size());
      return filled;
    }();
    return *signature;
  }

  template <class T>
  void field(const char* name, T&) {
    names_.push_back(PyUnicode_InternFromString(name));
    types_.push_back(python_type<T>());
  }
  void rows(const char* name, int64_t& value) { field(name, value); }
  void optional() { required_ = names_.size(); }

  // The value of each field; null for one that is left out.
  std::array<PyObject*, kMost> sorted(const char* function, PyObject* const* values, PyObject* keywords) const {
    std::array<PyObject*, kMost> ordered{};
    const size_t count = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (size_t i = 0, next = 0; i < count; ++i, ++next) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, i);
      if (next >= names_.size() || names_[next] != keyword) next = position(function, keyword);
      ordered[next] = values[i];
    }
    for (size_t i = 0; i < required_; ++i)
      if (!ordered[i]) throw py::type_error(std::string(function) + ": needs " + PyUnicode_AsUTF8(names_[i]));
    return ordered;
  }

  const char* name(size_t i) const { return PyUnicode_AsUTF8(names_[i]); }

  std::string text() const {
    std::string text = "(*";
    for (size_t i = 0; i < names_.size(); ++i)
      text += std::string(", ") + PyUnicode_AsUTF8(names_[i]) + (i < required_ ? "" : "=...");
    return text + ")";
  }

  // The same with types, which `inspect` does not read.
  std::string declaration() const {
    std::string text = "(*";
    for (size_t i = 0; i < names_.size(); ++i)
      text += std::string(", ") + name(i) + ": " + types_[i] + (i < required_ ? "" : " = ...");
    return text + ")";
  }

 private:
  size_t position(const char* function, PyObject* keyword) const {
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i] == keyword || PyUnicode_Compare(names_[i], keyword) == 0) return i;
    throw py::type_error(std::string(function) + ": takes no " + PyUnicode_AsUTF8(keyword));
  }

  std::vector<PyObject*> names_;
  std::vector<const char*> types_;
  size_t required_ = std::numeric_limits<size_t>::max();
};

// Puts Python's values into the fields.
class FieldReader {
 public:
  FieldReader(const char* function, PyObject* const* values) : function_(function), values_(values) {}

  template <class T>
  void field(const char* name, T& member) {
    if (PyObject* value = *values_++) read(name, value, member);
  }
  void rows(const char* name, int64_t& member) { field(name, member); }
  void optional() {}

 private:
  void check(const char* name, PyObject* value, bool fits) const {
    if (fits && !PyErr_Occurred()) return;
    PyErr_Clear();
    throw py::type_error(std::string(function_) + ": " + name + ": does not take " +
                         py::repr(value).cast<std::string>());
  }
  int64_t integer(const char* name, PyObject* value) const {
    const int64_t number = PyLong_AsLongLong(value);
    check(name, value, number != -1 || !PyErr_Occurred());
    return number;
  }
  Address address(const char* name, PyObject* value) const {
    const Address number = PyLong_AsUnsignedLongLong(value);
    check(name, value, number != static_cast<Address>(-1) || !PyErr_Occurred());
    return number;
  }

  template <class T>
    requires std::is_pointer_v<T>
  void read(const char* name, PyObject* value, T& member) const {
    member = reinterpret_cast<T>(address(name, value));
  }
  void read(const char* name, PyObject* value, Addresses& member) const {
    check(name, value, PyList_Check(value));
    member.resize(PyList_GET_SIZE(value));
    for (size_t i = 0; i < member.size(); ++i) member[i] = address(name, PyList_GET_ITEM(value, i));
  }
  void read(const char* name, PyObject* value, Activation& member) const {
    std::array<PyObject*, 9> parts;
    check(name, value, PyTuple_Check(value) && PyTuple_GET_SIZE(value) == parts.size());
    for (size_t i = 0; i < parts.size(); ++i) parts[i] = PyTuple_GET_ITEM(value, i);
    FieldReader reader(function_, parts.data());
    visit_activation(reader, member);
  }
  void read(const char* name, PyObject* value, float& member) const {
    member = static_cast<float>(PyFloat_AsDouble(value));
    check(name, value, true);
  }
  void read(const char* name, PyObject* value, Constants& member) const {
    check(name, value, PyTuple_Check(value));
    member.resize(PyTuple_GET_SIZE(value));
    for (size_t i = 0; i < member.size(); ++i) read(name, PyTuple_GET_ITEM(value, i), member[i]);
  }
  void read(const char* name, PyObject* value, Numbers& member) const {
    check(name, value, PyList_Check(value));
    member.resize(PyList_GET_SIZE(value));
    for (size_t i = 0; i < member.size(); ++i) member[i] = integer(name, PyList_GET_ITEM(value, i));
  }
  void read(const char* name, PyObject* value, bool& member) const { member = integer(name, value); }
  template <class T>
    requires std::is_integral_v<T> || std::is_enum_v<T>
  void read(const char* name, PyObject* value, T& member) const {
    const int64_t number = integer(name, value);
    check(name, value, sizeof(T) == sizeof number || number == static_cast<int32_t>(number));
    member = static_cast<T>(number);
  }

  const char* function_;
  PyObject* const* values_;
};

template <class Call>
PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  try {
    if (positional) throw py::type_error(std::string(Call::kName) + ": takes keywords alone");
    Call launch;
    const auto sorted = Signature::of<Call>().sorted(Call::kName, values, keywords);
    FieldReader reader(Call::kName, sorted.data());
    launch.fields(reader);
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
  static const std::string documentation = Call::kName + Signature::of<Call>().text() + "\n--\n\n" + text;
  static PyMethodDef method{Call::kName, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<Call>)),
                            METH_FASTCALL | METH_KEYWORDS, documentation.c_str()};
  module.attr(Call::kName) = py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, nullptr, nullptr));
  if (!py::hasattr(module, "declarations")) module.attr("declarations") = py::dict();
  constexpr bool counts_bytes = requires(Call call) { call.bytes(); };
  module.attr("declarations")[Call::kName] =
      Signature::of<Call>().declaration() + " -> " + (counts_bytes ? "int" : "None");
}

}  // namespace fusible::python
