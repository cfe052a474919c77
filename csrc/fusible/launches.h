// Launches that are kept, to be made again with other addresses.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "fusible/error.h"

namespace fusible {

using Address = uintptr_t;
using Addresses = std::vector<Address>;

// Where an address of a launch comes from: the `position`-th argument (the `element`-th of it, if it is a list) lies `offset` bytes behind
// the `source`-th address that a run is given.
struct Patch {
  int64_t position, element, source, offset;
};

class Launches {
 public:
  template <class... Args>
  void add(void (*function)(Args...), const std::vector<Patch>& patches, const std::decay_t<Args>&... args) {
    const auto arguments = std::make_shared<std::tuple<std::decay_t<Args>...>>(args...);
    for (const Patch& patch : patches) {
      patches_.push_back({place(*arguments, patch), static_cast<size_t>(patch.source), patch.offset});
      sources_ = std::max(sources_, patches_.back().source + 1);
    }
    launches_.push_back([function, arguments] { std::apply(function, *arguments); });
  }

  // Not from two threads at once.
  void run(const Addresses& addresses) {
    FUSIBLE_CHECK(addresses.size() >= sources_, "launches of ", sources_, " tensors got ", addresses.size());
    for (const auto& [target, source, offset] : patches_) *target = addresses[source] + offset;
    for (const auto& launch : launches_) launch();
  }

 private:
  struct Target {
    Address* address;
    size_t source;
    int64_t offset;
  };

  static Address* address_in(Address& address, int64_t) { return &address; }
  static Address* address_in(Addresses& list, int64_t element) { return &list.at(element); }
  template <class T>
  static Address* address_in(T&, int64_t) { return nullptr; }

  template <class... Values>
  static Address* place(std::tuple<Values...>& values, const Patch& patch) {
    Address* found = nullptr;
    int64_t position = 0;
    const auto look = [&](auto& value) {
      if (position++ == patch.position) found = address_in(value, patch.element);
    };
    std::apply([&](auto&... value) { (look(value), ...); }, values);
    FUSIBLE_CHECK(found, "argument ", patch.position, " is no address");
    return found;
  }

  std::vector<std::function<void()>> launches_;
  std::vector<Target> patches_;
  size_t sources_ = 0;
};

// Which of a function's arguments are addresses or lists of them.
template <class... Args>
std::vector<int> address_positions(void (*)(Args...)) {
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
