// SPDX-License-Identifier: Apache-2.0
// Launches as values; the capture of launches while they are made; and captured launches, which are made again with
// other addresses, on another stream, for another number of rows.
//
// A launch derives from OnStream and has
//   kName               its name in Python
//   fields(table)       tells each field with its name. The type of a member says what it is: an address is a pointer,
//                       a list of them `Addresses`, of numbers `Numbers`. Numbers of rows are told as such.
//   complete()          derives from the fields what else run() needs, if anything
//   run()
//   zero_before(zeroing) for launches that share one zeroing kernel
// A workspace is such a struct too; it has bytes() instead of the functions after the fields.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fusible/error.h"
#include "fusible/fields.h"
#include "fusible/independent.h"
#include "fusible/wrong_sizes.h"
#include "fusible/zeroing.h"

namespace fusible {

struct OnStream {
  int device = 0;
  cudaStream_t stream = nullptr;
  void complete() {}
};

// A launch that is one call of a function.
template <class CallOf, auto kFunction>
struct LaunchOf : OnStream {
  CallOf call{};
  void run() const { kFunction(call, device, stream); }
};

// The target of an address: an offset in bytes from the start of a tensor. Given tensors are numbered first, then
// allocations.
struct Source {
  static constexpr int64_t kNull = -1;
  int64_t tensor = kNull, offset = 0;
  bool operator==(const Source&) const = default;
};

// A number that is fixed, or grows with the rows.
struct Count {
  int64_t fixed, per_row;
  int64_t at(int64_t rows) const { return fixed + per_row * rows; }
};

// The fields of a captured launch, or of a workspace: their values, and where those stand that differ between calls.
struct CapturedFields {
  const char* name = "";
  std::vector<int64_t> numbers;
  std::vector<Source> sources;
  std::vector<int64_t> row_numbers;
  std::vector<void*> addresses;  // of the sources
  std::vector<int64_t*> rows;    // of the row numbers
  cudaStream_t* stream = nullptr;

  // Whether two captures with different numbers of rows made the same launch, as far as this tells.
  bool matches(const CapturedFields& other) const {
    return !std::strcmp(name, other.name) && numbers == other.numbers && sources == other.sources &&
           row_numbers.size() == other.row_numbers.size();
  }
};

struct CapturedLaunch {
  CapturedFields fields;
  virtual ~CapturedLaunch() = default;
  // Null: the launch zeroes its memory itself.
  virtual const OnStream& prepare(Zeroing* zeroing) = 0;
  virtual void run() = 0;
};

struct CapturedWorkspace {
  CapturedFields fields;
  virtual ~CapturedWorkspace() = default;
  virtual int64_t bytes() = 0;
};

// The bytes to allocate for a workspace, never zero: an allocation of zero bytes has no address, so a capture could not
// tell that the launch reads it, and a replay that needs more bytes would launch with a null pointer.
template <class Workspace>
int64_t allocated_bytes(const Workspace& workspace) {
  return std::max<int64_t>(workspace.bytes(), 16);
}

// Memory that is allocated during a capture; `workspace`: it is as large as the extension has said that one must be.
struct CapturedAllocation {
  Address first;
  int64_t bytes;
  bool per_row;  // its first size is the number of rows, if that varies
  std::shared_ptr<CapturedWorkspace> workspace;
};

// An allocation that the run returns, all of it.
struct CapturedResult {
  int64_t allocation, first_size;
};

// Launches in a thread are recorded by a capture that is active in it.
class Capture {
 public:
  // `spans`: the address and the bytes of each given tensor. `owned`: the numbers of tensors that only the replay holds
  // and that grow with the rows.
  Capture(std::vector<std::array<Address, 2>> spans, int64_t rows, Numbers owned = {})
      : rows_(rows), spans_(std::move(spans)), owned_(std::move(owned)) {}

  static Capture*& active() {
    static thread_local Capture* capture = nullptr;
    return capture;
  }

  void refuse(const std::string& reason) {
    if (!refusal_) refusal_ = reason;
  }
  const std::optional<std::string>& refusal() const { return refusal_; }

  // Returns whether the memory is a workspace whose size the extension was asked for just before.
  bool allocated(Address first, int64_t bytes, bool per_row) {
    std::shared_ptr<CapturedWorkspace> workspace = std::exchange(asked_, nullptr);
    if (workspace && workspace->bytes() != bytes) workspace = nullptr;
    allocations_.push_back({first, bytes, per_row, workspace});
    return workspace != nullptr;
  }

  // Locates a result of the run, from its first address to its last: the number of the given tensor or, after those, of
  // the result; -1 if none. Its first size is -1 if it has no dims or is strided.
  int64_t result(Address address, int64_t bytes, int64_t first_size) {
    const Source source = find(address);
    const int64_t allocation = source.tensor - std::ssize(spans_);
    if (source == Source{}) {
      refuse("a result is empty, of a type of its own, or neither an input nor all of an allocation");
    } else if (allocation < 0) {
      if (source.offset || bytes != static_cast<int64_t>(spans_[source.tensor][1])) refuse("a result is an input");
    } else {
      if (first_size < 0) refuse("a result has no dims or is strided");
      if (source.offset || bytes != allocations_[allocation].bytes) refuse("a result is a part of an allocation");
      if (std::ranges::find(results_, allocation, &CapturedResult::allocation) != results_.end())
        refuse("two results are one allocation");
      results_.push_back({allocation, first_size});
      return std::ssize(spans_) + std::ssize(results_) - 1;
    }
    return source.tensor;
  }

  template <class Launch>
  void launched(const Launch& launch);
  template <class Workspace>
  void asked(const Workspace& workspace);

 private:
  friend class Launches;

  // Notes the fields of a launch or a workspace.
  void collect(CapturedFields& to, const Fields& fields, void* call) {
    const auto add = [&](void* target, Address address) {
      to.addresses.push_back(target);
      to.sources.push_back(find(address));
    };
    const auto add_all = [&](const auto& numbers) {
      to.numbers.push_back(std::ssize(numbers));
      for (const auto number : numbers) to.numbers.push_back(number_of(number));
    };
    for (const Field& field : fields.all) {
      switch (field.type) {
        case Field::Type::kStream: to.stream = &field.in<cudaStream_t>(call); break;
        case Field::Type::kAddress: add(field.at(call), field.get<Address>(call)); break;
        case Field::Type::kAddresses:
          to.numbers.push_back(std::ssize(field.in<Addresses>(call)));
          for (Address& address : field.in<Addresses>(call)) add(&address, address);
          break;
        case Field::Type::kNumbers: add_all(field.in<Numbers>(call)); break;
        case Field::Type::kConstants: add_all(field.in<Constants>(call)); break;
        case Field::Type::kActivation: collect(to, Fields::of<ActivationFields>(), &field.in<Activation>(call)); break;
        case Field::Type::kFloat: to.numbers.push_back(number_of(field.in<float>(call))); break;
        case Field::Type::kBool: to.numbers.push_back(field.in<bool>(call)); break;
        case Field::Type::kInt32: to.numbers.push_back(field.get<int32_t>(call)); break;
        case Field::Type::kInt64:
          if (field.is_rows) to.rows.push_back(&field.in<int64_t>(call));
          (field.is_rows ? to.row_numbers : to.numbers).push_back(field.get<int64_t>(call));
      }
    }
  }
  static int64_t number_of(int64_t number) { return number; }
  static int64_t number_of(float number) { return std::bit_cast<int32_t>(number); }

  // Every address must be in the latest allocation that had it, or in one tensor that is given.
  Source find(Address address) {
    Source source;
    if (!address) return source;
    for (int64_t i = std::ssize(allocations_) - 1; i >= 0; --i)
      if (address - allocations_[i].first < static_cast<Address>(allocations_[i].bytes))
        return {std::ssize(spans_) + i, static_cast<int64_t>(address - allocations_[i].first)};
    for (int64_t i = 0; i < std::ssize(spans_); ++i) {
      if (address - spans_[i][0] >= spans_[i][1]) continue;
      if (source != Source{}) refuse("inputs overlap, so that an address does not say whose it is");
      source = {i, static_cast<int64_t>(address - spans_[i][0])};
    }
    if (source == Source{}) refuse("a launch reads or writes memory that was neither given nor allocated");
    return source;
  }

  int64_t rows_;
  std::vector<std::array<Address, 2>> spans_;
  Numbers owned_;
  std::vector<CapturedAllocation> allocations_;
  std::vector<CapturedResult> results_;
  std::vector<std::shared_ptr<CapturedLaunch>> launches_;
  std::shared_ptr<CapturedWorkspace> asked_;
  std::optional<std::string> refusal_;
};

template <class Launch>
void Capture::launched(const Launch& launch) {
  struct Captured final : CapturedLaunch {
    Launch launch;
    explicit Captured(const Launch& value) : launch(value) {}
    const OnStream& prepare(Zeroing* zeroing) override {
      launch.complete();
      if constexpr (requires { launch.zero_before(*zeroing); })
        if (zeroing) launch.zero_before(*zeroing);
      return launch;
    }
    void run() override { count_launch(), launch.run(); }
  };
  const auto captured = std::make_shared<Captured>(launch);
  captured->fields.name = Launch::kName;
  collect(captured->fields, Fields::of<Launch>(), &captured->launch);
  launches_.push_back(captured);
}

template <class Workspace>
void Capture::asked(const Workspace& workspace) {
  struct Captured final : CapturedWorkspace {
    Workspace workspace;
    explicit Captured(const Workspace& value) : workspace(value) {}
    int64_t bytes() override { return allocated_bytes(workspace); }
  };
  const auto captured = std::make_shared<Captured>(workspace);
  captured->fields.name = Workspace::kName;
  collect(captured->fields, Fields::of<Workspace>(), &captured->workspace);
  asked_ = captured;
}

// Makes a launch, and lets the capture note it if there is one. Whatever launches calls this.
template <class Launch>
void launch_now(Launch& launch) {
  raise_wrong_sizes(launch.device);
  launch.complete();
  count_launch();
  launch.run();
  if (Capture* capture = Capture::active()) capture->launched(launch);
}

// Captured launches. The launches of one capture are made again for its number of rows; the launches of two captures
// whose calls differ only in the number of rows, for any number.
//
// All memory is allocated first, then all launches are made. A run that need not hold `large` bytes until its last
// launch releases memory in between: each launch allocates the memory that it is the first to need, and releases the
// memory that it is the last to read, as if an op made them one by one.
class Launches {
 public:
  // Joins two captures if they fit together, else uses `capture`.
  static std::shared_ptr<Launches> of(const Capture& capture, const Capture* first, int64_t large) {
    const bool differ = first && first->rows_ != capture.rows_;
    const std::shared_ptr<Launches> joined = differ ? of_both(*first, capture, large) : nullptr;
    if (joined) joined->for_any_rows_ = true;
    return joined ? joined : of_both(capture, capture, large);
  }

  bool for_any_rows() const { return for_any_rows_; }

  // Tensors have
  //   addresses()             of those that are given
  //   allocate(number, size)  returns the address; numbers follow those of the given ones. The size of a result is its
  //                           first one; of later pieces, bytes.
  //   release(number)
  // While memory is allocated or released, another thread may run the same launches.
  template <class Tensors>
  void run(Tensors&& tensors, int64_t rows, int64_t stream) {
    Addresses addresses = tensors.addresses();
    FUSIBLE_CHECK(std::ssize(addresses) == inputs_, "launches of ", inputs_, " tensors got ", addresses.size());
    const Numbers sizes = sizes_at(rows);
    addresses.resize(inputs_ + sizes.size());
    if (released_early(sizes, rows) >= large_) {
      for (int64_t i = 0; i < std::ssize(launches_); ++i) {
        for (int64_t number = inputs_; number < std::ssize(addresses); ++number)
          if (uses_[number].first == i) addresses[number] = tensors.allocate(number, sizes[number - inputs_]);
        launch({&launches_[i], 1}, false, addresses, rows, stream);
        for (int64_t number = 0; number < std::ssize(addresses); ++number)
          if (uses_[number].last == i && is_released(number)) tensors.release(number);
      }
    } else {
      allocate_all(tensors, sizes, addresses);
      launch(launches_, true, addresses, rows, stream);
    }
  }

 private:
  static constexpr int64_t kAlignment = 256;  // of pieces of scratch memory, as torch's own allocations are

  struct RowTarget {
    int64_t* target;
    Count count;
  };
  struct AddressTarget {
    void* target;
    int64_t number, offset;  // of the tensor
  };
  struct Replayed {
    std::shared_ptr<CapturedLaunch> captured;
    std::vector<AddressTarget> addresses;
    std::vector<RowTarget> rows;
  };
  // Memory that is neither given nor returned.
  struct Piece {
    Count count;
    std::shared_ptr<CapturedWorkspace> workspace;  // or what tells the size
    std::vector<RowTarget> rows;                   // of it

    int64_t bytes(int64_t number) const {
      for (const auto& [target, rows_of_workspace] : rows) *target = rows_of_workspace.at(number);
      const int64_t size = workspace ? workspace->bytes() : count.at(number);
      return (size + kAlignment - 1) / kAlignment * kAlignment;
    }
  };
  // An input that has no other owner.
  struct Owned {
    int64_t number;
    Count bytes;
  };
  // The first and the last launch that is told of a tensor, -1 if none.
  struct Uses {
    int64_t first = -1, last = -1;
  };

  // Null if the captures do not fit together.
  static std::shared_ptr<Launches> of_both(const Capture& first, const Capture& second, int64_t large) {
    auto launches = std::make_shared<Launches>();
    launches->inputs_ = std::ssize(first.spans_), launches->large_ = large;
    const bool fits = first.spans_.size() == second.spans_.size() &&
                      first.allocations_.size() == second.allocations_.size() && launches->add_results(first, second) &&
                      launches->add_memory(first, second) && launches->add_launches(first, second);
    if (fits) launches->add_uses(first);
    return fits ? launches : nullptr;
  }

  static std::optional<Count> common(int64_t a, int64_t b, const Capture& first, const Capture& second) {
    if (a == b) return Count{a, 0};
    if (first.rows_ <= 0 || a % first.rows_ || a / first.rows_ * second.rows_ != b) return std::nullopt;
    return Count{0, a / first.rows_};
  }

  static bool add_rows(std::vector<RowTarget>& to, const CapturedFields& a, const CapturedFields& b,
                       const Capture& first, const Capture& second) {
    for (size_t i = 0; i < a.rows.size(); ++i) {
      const auto count = common(a.row_numbers[i], b.row_numbers[i], first, second);
      if (!count) return false;
      to.push_back({a.rows[i], *count});
    }
    return true;
  }

  bool add_results(const Capture& first, const Capture& second) {
    if (first.results_.size() != second.results_.size()) return false;
    for (size_t i = 0; i < first.results_.size(); ++i) {
      const CapturedResult &a = first.results_[i], &b = second.results_[i];
      const auto count = common(a.first_size, b.first_size, first, second);
      if (a.allocation != b.allocation || !count) return false;
      results_.push_back(*count);
    }
    return true;
  }

  bool add_memory(const Capture& first, const Capture& second) {
    const int64_t results = std::ssize(results_);
    for (int64_t i = 0; i < inputs_; ++i) numbers_.push_back(i);
    for (int64_t i = 0; i < std::ssize(first.allocations_); ++i) {
      const CapturedAllocation &a = first.allocations_[i], &b = second.allocations_[i];
      if (a.per_row != b.per_row || !a.workspace != !b.workspace) return false;
      const auto result = std::ranges::find(first.results_, i, &CapturedResult::allocation) - first.results_.begin();
      numbers_.push_back(inputs_ + (result < results ? result : results + std::ssize(pieces_)));
      if (result == results && !add_piece(a, b, first, second)) return false;
    }
    return true;
  }

  bool add_piece(const CapturedAllocation& a, const CapturedAllocation& b, const Capture& first,
                 const Capture& second) {
    Piece piece{{a.bytes, 0}, a.workspace, {}};
    if (a.workspace) {
      const CapturedFields &of_a = a.workspace->fields, &of_b = b.workspace->fields;
      if (!of_a.matches(of_b) || !add_rows(piece.rows, of_a, of_b, first, second)) return false;
    } else if (a.bytes != b.bytes) {
      const auto count = a.per_row ? common(a.bytes, b.bytes, first, second) : std::nullopt;
      if (!count) return false;
      piece.count = *count;
    }
    pieces_.push_back(std::move(piece));
    return true;
  }

  bool add_launches(const Capture& first, const Capture& second) {
    if (first.launches_.size() != second.launches_.size()) return false;
    for (size_t i = 0; i < first.launches_.size(); ++i) {
      const CapturedFields &a = first.launches_[i]->fields, &b = second.launches_[i]->fields;
      Replayed& launch = launches_.emplace_back(first.launches_[i]);
      if (!a.matches(b) || !add_rows(launch.rows, a, b, first, second)) return false;
      for (size_t j = 0; j < a.sources.size(); ++j) {
        const auto [tensor, offset] = a.sources[j];
        if (tensor != Source::kNull) launch.addresses.push_back({a.addresses[j], numbers_[tensor], offset});
      }
    }
    return true;
  }

  void add_uses(const Capture& capture) {
    uses_.resize(inputs_ + results_.size() + pieces_.size());
    for (int64_t i = 0; i < std::ssize(launches_); ++i)
      for (const AddressTarget& target : launches_[i].addresses) {
        Uses& uses = uses_[target.number];
        uses = {uses.first < 0 ? i : uses.first, i};
      }
    for (size_t i = 0; i < results_.size(); ++i)
      uses_[inputs_ + i].first = std::max<int64_t>(0, uses_[inputs_ + i].first);
    for (const int64_t number : capture.owned_)
      owned_.push_back({number, {0, static_cast<int64_t>(capture.spans_[number][1]) / capture.rows_}});
  }

  bool is_released(int64_t number) const {
    return number >= inputs_ + std::ssize(results_) || std::ranges::count(owned_, number, &Owned::number);
  }

  // The first sizes of the results, then the bytes of the pieces.
  Numbers sizes_at(int64_t rows) const {
    Numbers sizes;
    for (const Count& count : results_) sizes.push_back(count.at(rows));
    for (const Piece& piece : pieces_) sizes.push_back(piece.bytes(rows));
    return sizes;
  }

  // The bytes that are not needed until the last launch.
  int64_t released_early(const Numbers& sizes, int64_t rows) const {
    const auto is_early = [&](int64_t number) { return uses_[number].last + 1 < std::ssize(launches_); };
    int64_t bytes = 0;
    for (int64_t i = std::ssize(results_); i < std::ssize(sizes); ++i) bytes += is_early(inputs_ + i) ? sizes[i] : 0;
    for (const Owned& owned : owned_) bytes += is_early(owned.number) ? owned.bytes.at(rows) : 0;
    return bytes;
  }

  // Pieces of at least `large` bytes are allocated separately: an allocator reuses those of earlier calls. All other
  // pieces are parts of one scratch buffer.
  template <class Tensors>
  void allocate_all(Tensors& tensors, const Numbers& sizes, Addresses& addresses) const {
    const auto is_part = [&](int64_t i) { return i >= std::ssize(results_) && sizes[i] < large_; };
    int64_t scratch_bytes = 0;
    for (int64_t i = 0; i < std::ssize(sizes); ++i)
      if (is_part(i)) scratch_bytes += sizes[i];
      else addresses[inputs_ + i] = tensors.allocate(inputs_ + i, sizes[i]);
    if (!scratch_bytes) return;
    Address scratch = tensors.allocate(std::ssize(addresses), scratch_bytes);
    for (int64_t i = 0; i < std::ssize(sizes); ++i)
      if (is_part(i)) addresses[inputs_ + i] = std::exchange(scratch, scratch + sizes[i]);
  }

  // `zero_together`: one kernel zeroes the memory of all of them.
  void launch(std::span<const Replayed> launches, bool zero_together, const Addresses& addresses, int64_t rows,
              int64_t stream) {
    zeroing_.counters.clear(), zeroing_.tails.clear();
    OnStream last;
    for (const auto& [captured, address_targets, row_targets] : launches) {
      for (const auto& [target, number, offset] : address_targets) {
        const Address address = addresses[number] + offset;
        std::memcpy(target, &address, sizeof address);
      }
      for (const auto& [target, count] : row_targets) *target = count.at(rows);
      *captured->fields.stream = reinterpret_cast<cudaStream_t>(stream);
      last = captured->prepare(zero_together ? &zeroing_ : nullptr);
    }
    raise_wrong_sizes(last.device);
    zero(zeroing_, last.device, last.stream);
    for (const Replayed& each : launches) each.captured->run();
  }

  std::vector<Replayed> launches_;
  std::vector<Count> results_;  // their first sizes
  std::vector<Piece> pieces_;
  Numbers numbers_;  // maps the number of a source to that of a tensor: inputs, then results, then pieces
  std::vector<Uses> uses_;
  std::vector<Owned> owned_;
  int64_t inputs_ = 0, large_ = 0;
  bool for_any_rows_ = false;
  Zeroing zeroing_;
};

}  // namespace fusible
