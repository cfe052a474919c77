// A grid of blocks of threads, each a fiber of one thread of the CPU. A fiber runs until it must wait; when all of them wait, the
// kernel hangs, and the launch fails with what each waits for.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

extern dim3 gridDim, blockDim;  // of the running kernel

namespace emulation {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Stops the launch; names the thread that is running, if there is one.
[[noreturn]] void fault(const std::string& text);

template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  fault(text.str());
}

// Where all of some threads meet.
struct Meeting {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Warp : Meeting {
  uint64_t values[2][32];  // what the lanes exchange, by turns
};

// What a fiber waits for: an mbarrier's phase, or a meeting's next generation.
struct Wait {
  const uint64_t* barrier = nullptr;
  uint32_t parity = 0;
  const Meeting* meeting = nullptr;
  uint64_t generation = 0;
  const char* action = "";
  bool over() const;
};

enum class Elements { kFloat16, kBFloat16, kE4M3 };

// One wgmma as the thread issued it.
struct Product {
  float* accumulator;
  uint64_t a, b;
  int columns;
  bool accumulate, transpose_a, transpose_b;
  Elements elements;
  bool a_in_registers = false;
  uint32_t registers[4] = {};
  bool same(const Product& p) const {
    return a == p.a && b == p.b && columns == p.columns && accumulate == p.accumulate && transpose_a == p.transpose_a &&
           transpose_b == p.transpose_b && elements == p.elements;
  }
};

// Asynchronous operations of a thread, in groups. They are carried out as late as their waits allow.
template <class Operation>
struct Pending {
  std::vector<std::vector<Operation>> groups;
  std::vector<Operation> open;
  void commit() { groups.push_back(std::move(open)), open.clear(); }
  template <class Body>
  void complete_all_but(int newest, Body body) {
    while (static_cast<int>(groups.size()) > newest) {
      for (Operation& operation : groups.front()) body(operation);
      groups.erase(groups.begin());
    }
  }
  bool empty() const { return groups.empty() && open.empty(); }
};

struct Block;

struct Thread {
  uint3 index;
  int number;  // in the block
  Block* block;
  Wait wait;
  bool done = false;
  bool waited = false;  // for the kernels before this one
  bool beside = false;  // it goes on without that
  size_t fiber = 0;     // the number of its stack
  Pending<Product> products;
  Pending<std::function<void()>> stores, copies;
  std::map<const void*, uint64_t> acquired;  // tensor maps, as they were published last
  int lane() const { return number % 32; }
  Warp& warp() const;
};

struct Cluster : Meeting {
  std::vector<Block*> blocks;
  int live = 0;
};

struct Block {
  uint3 index;
  int rank = 0;  // in the cluster
  Cluster* cluster = nullptr;
  uint8_t* shared = nullptr;  // what the launch asked for, from kSharedBase on
  size_t shared_bytes = 0;
  std::map<const void*, std::vector<uint64_t>> variables;  // __shared__ variables
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Meeting> warpgroups;
  Meeting all;
  int live = 0;
  bool waited = false;  // one of its threads that has ended
};

extern Thread* current;
extern bool overlapped;  // whether the running kernel may begin before those before it have ended
constexpr uint32_t kSharedBase = 1024;  // of the address window; sm_90 keeps the first KB

void wait(const Wait& wait);
void yield();  // the others take their turns first

// Returns when `expected` threads have come here; the last of them calls last() first.
template <class Last>
void meet(Meeting& meeting, int expected, const char* action, Last last) {
  if (++meeting.arrived >= expected) {
    last();
    meeting.arrived = 0;
    ++meeting.generation;
  } else {
    wait({.meeting = &meeting, .generation = meeting.generation, .action = action});
  }
}

// The values of all lanes of the warp, until the next exchange.
const uint64_t* exchange(uint64_t value, const char* action);

struct Config {
  dim3 grid, block;
  size_t shared_bytes = 0;
  cudaStream_t stream{};
  unsigned cluster = 1;
  bool overlapped = false;
};
// Runs `body` in every thread of a grid. Blocks are alive in waves of as many as the device has multiprocessors.
void launch(const Config& config, const std::function<void()>& body);
inline void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const std::function<void()>& body) {
  launch(Config{grid, block, shared_bytes, stream}, body);
}

// ---- shared memory
uint32_t shared_address(const void* pointer);                         // within the running thread's block
uint8_t* shared_pointer(Block& block, uint32_t address, size_t bytes);
inline uint8_t* shared_pointer(uint32_t address, size_t bytes) { return shared_pointer(*current->block, address, bytes); }
// Where the 128-byte swizzle puts a byte.
inline uint32_t swizzled(uint32_t address, uint32_t span = 128) { return address ^ (address >> 7 & (span / 16 - 1)) << 4; }

void* variable_of_block(const void* key, size_t bytes);
template <class T>
T& shared_variable() {
  static const char key = 0;
  return *static_cast<T*>(variable_of_block(&key, sizeof(T)));
}

// ---- device memory: the buffers that copies may touch
void check_memory(uint64_t address, uint64_t bytes, const char* action, bool writes = false);

// ---- overlapping kernels
void begin_beside();
void let_next_begin();

constexpr int kMultiprocessors = 4, kSharedLimit = 232448;

}  // namespace emulation
