// SPDX-License-Identifier: Apache-2.0
// The fields of a launch or a workspace as a table: names, types and places. Made once for each, so that what reads or
// notes fields is one loop for all launches.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fusible/activation.h"
#include "fusible/pointwise.h"

namespace fusible {

using Address = uintptr_t;
using Addresses = std::vector<Address>;
using Numbers = std::vector<int64_t>;

struct Field {
  enum class Type { kAddress, kStream, kAddresses, kNumbers, kActivation, kFloat, kConstants, kBool, kInt32, kInt64 };
  std::string name;
  Type type;
  bool is_rows;   // a number that is linear in the rows
  size_t offset;  // in its struct

  void* at(void* call) const { return static_cast<char*>(call) + offset; }
  // The member, whose type is exactly this.
  template <class T>
  T& in(void* call) const {
    return *static_cast<T*>(at(call));
  }
  // The value of a member with as many bytes: any pointer is an Address, any enumeration a number.
  template <class T>
  T get(void* call) const {
    T value;
    std::memcpy(&value, at(call), sizeof value);
    return value;
  }
  template <class T>
  void set(void* call, T value) const {
    std::memcpy(at(call), &value, sizeof value);
  }
};

class Fields {
 public:
  // The table of a struct that tells its fields: call.fields(Fields&).
  template <class Call>
  static const Fields& of() {
    static const Fields fields = [] {
      Call call;
      Fields told(&call);
      call.fields(told);
      return told;
    }();
    return fields;
  }
  explicit Fields(const void* call) : first_(reinterpret_cast<uintptr_t>(call)) {}

  template <class T>
  void field(const char* name, T& member) {
    all.push_back({name, type_of<T>(), false, reinterpret_cast<uintptr_t>(&member) - first_});
  }
  // See FUSIBLE_FIELDS.
  template <class... Ts>
  void members(std::string_view expressions, Ts&... members) {
    (field(take_name(expressions).c_str(), members), ...);
  }
  void rows(const char* name, int64_t& member) {
    field(name, member);
    all.back().is_rows = true;
  }
  // Says that the fields told after this may be left out.
  void optional() { required = all.size(); }

  std::vector<Field> all;
  size_t required = std::numeric_limits<size_t>::max();

 private:
  // Takes the first of "call.type, call.x" away, and returns its last part.
  static std::string take_name(std::string_view& expressions) {
    const std::string_view first = expressions.substr(0, expressions.find(','));
    expressions.remove_prefix(std::min(expressions.size(), first.size() + 1));
    return std::string(first.substr(first.find_last_of(". ") + 1));
  }
  template <class T>
  static constexpr Field::Type type_of() {
    using enum Field::Type;
    if constexpr (std::is_same_v<T, cudaStream_t>) return kStream;
    else if constexpr (std::is_pointer_v<T>) return kAddress;
    else if constexpr (std::is_same_v<T, Addresses>) return kAddresses;
    else if constexpr (std::is_same_v<T, Numbers>) return kNumbers;
    else if constexpr (std::is_same_v<T, Activation>) return kActivation;
    else if constexpr (std::is_same_v<T, float>) return kFloat;
    else if constexpr (std::is_same_v<T, Constants>) return kConstants;
    else if constexpr (std::is_same_v<T, bool>) return kBool;
    else {
      static_assert((std::is_integral_v<T> || std::is_enum_v<T>) && (sizeof(T) == 4 || sizeof(T) == 8));
      return sizeof(T) == 4 ? kInt32 : kInt64;
    }
  }

  uintptr_t first_;
};

// Tells members under their own names: FUSIBLE_FIELDS(v, call.type, call.x) is v.field("type", call.type), ...
#define FUSIBLE_FIELDS(v, ...) (v).members(#__VA_ARGS__, __VA_ARGS__)

struct ActivationFields {
  Activation a{};
  void fields(Fields& v) {
    FUSIBLE_FIELDS(v, a.curve, a.gated, a.alpha, a.limit, a.linear_offset, a.block), v.field("kernel", a.kernels[0]);
    v.field("other_kernel", a.kernels[1]), v.field("deep_kernel", a.kernels[2]);
  }
};

}  // namespace fusible
