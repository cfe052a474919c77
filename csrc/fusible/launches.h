// SPDX-License-Identifier: Apache-2.0
// Launches that are kept, to be made again with other addresses.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "fusible/error.h"
#include "fusible/zeroing.h"

namespace fusible {

using Address = uintptr_t;
using Addresses = std::vector<Address>;

// Where an argument of a launch comes from: the `position`-th (the `element`-th of it, if it is a list) is an address
// that lies `offset` bytes, and `factor` for each of kRowBlock rows begun, behind the `source`-th that a run is given;
// or of kNumber: `offset` and `factor` for each row; or it is the stream.
struct Patch {
  static constexpr int64_t kNumber = -1, kStream = -2;
  int64_t position, element, source, offset, factor;
};
inline constexpr int64_t kRowBlock =
    128;  // so that whatever stands behind many rows is aligned as what stands behind few

// A call on a stream of a device: there is zero_before(call, zeroing) and launch(call, device, stream).
template <class Call>
struct OnStream {
  Call call;
  int device;
  cudaStream_t stream;
};

class Launches {
 public:
  template <class... Args>
  void add(void (*function)(Args...), const std::vector<Patch>& patches, const std::decay_t<Args>&... args) {
    const auto arguments = keep(patches, {args...});
    launches_.push_back([function, arguments] { apply(function, *arguments, std::index_sequence_for<Args...>()); });
  }

  // One kernel zeroes what all such calls must find zeroed.
  template <class Call, class... Args>
  void add(OnStream<Call> (*make)(Args...), const std::vector<Patch>& patches, const std::decay_t<Args>&... args) {
    const auto arguments = keep(patches, {args...});
    const auto made = std::make_shared<OnStream<Call>>();
    prepare_.push_back([=](Launches& launches) {
      *made = apply(make, *arguments, std::index_sequence_for<Args...>());
      zero_before(made->call, launches.zeroing_);
      launches.device_ = made->device, launches.stream_ = made->stream;
    });
    launches_.push_back([made] { launch(made->call, made->device, made->stream); });
  }

  // Not from two threads at once.
  void run(const Addresses& addresses, int64_t rows, int64_t stream) {
    FUSIBLE_CHECK(static_cast<int64_t>(addresses.size()) >= sources_, "launches of ", sources_, " tensors got ",
                  addresses.size());
    const int64_t padded = (rows + kRowBlock - 1) / kRowBlock * kRowBlock;
    for (const auto& [target, source, offset, factor] : patches_)
      *target = source == Patch::kStream   ? stream
                : source == Patch::kNumber ? offset + factor * rows
                                           : addresses[source] + offset + factor * padded;
    zeroing_.counters.clear(), zeroing_.tails.clear();
    for (const auto& prepare : prepare_) prepare(*this);
    zero(zeroing_, device_, stream_);
    for (const auto& launch : launches_) launch();
  }

 private:
  struct Target {
    Address* address;  // or a number
    int64_t source, offset, factor;
  };

  // An argument that is kept. A list of these rather than a tuple, which for dozens of arguments takes the compiler
  // seconds a function.
  using Value = std::variant<Address, Addresses, int64_t, int, bool, float>;
  using Values = std::vector<Value>;

  static Address* address_in(Value& value, int64_t element) {
    if (Addresses* list = std::get_if<Addresses>(&value)) return &list->at(element);
    if (int64_t* number = std::get_if<int64_t>(&value))
      return reinterpret_cast<Address*>(number);  // of the same type but for the sign
    return std::get_if<Address>(&value);
  }

  std::shared_ptr<Values> keep(const std::vector<Patch>& patches, Values values) {
    const auto arguments = std::make_shared<Values>(std::move(values));
    for (const auto& [position, element, source, offset, factor] : patches) {
      const bool given = position >= 0 && position < static_cast<int64_t>(arguments->size());
      Address* target = given ? address_in((*arguments)[position], element) : nullptr;
      FUSIBLE_CHECK(target, "argument ", position, " is neither an address nor a number");
      patches_.push_back({target, source, offset, factor});
      sources_ = std::max(sources_, source + 1);
    }
    return arguments;
  }

  template <class Made, class... Args, size_t... kPositions>
  static Made apply(Made (*function)(Args...), const Values& values, std::index_sequence<kPositions...>) {
    return function(*std::get_if<std::decay_t<Args>>(&values[kPositions])...);
  }

  std::vector<std::function<void(Launches&)>> prepare_;
  std::vector<std::function<void()>> launches_;
  std::vector<Target> patches_;
  int64_t sources_ = 0;
  Zeroing zeroing_;
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
};

// Which of a function's arguments are addresses or lists of them.
template <class Made, class... Args>
std::vector<int> address_positions(Made (*)(Args...)) {
  std::vector<int> positions;
  int position = 0;
  const auto look = [&](bool is_address) {
    if (is_address) positions.push_back(position);
    ++position;
  };
  (look(std::is_same_v<std::decay_t<Args>, Address> || std::is_same_v<std::decay_t<Args>, Addresses>), ...);
  return positions;
}

}  // namespace fusible
