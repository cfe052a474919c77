#include "fibers.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>

dim3 gridDim, blockDim;

namespace emulation {

Thread* current = nullptr;
bool overlapped = false;

namespace {

constexpr size_t kStackBytes = 128 << 10, kGuardBytes = 4096;
constexpr uint8_t kGuard = 0xA5;

std::string failure;  // of the running launch
const std::function<void()>* body_of_launch;
unsigned seed = 0;
std::vector<std::pair<uint64_t, uint64_t>> memory;  // first and last byte + 1 of what copies may touch

// Intervals of addresses that do not meet, by their first.
class Intervals {
 public:
  void add(uint64_t first, uint64_t end) {
    auto at = ends_.upper_bound(first);
    if (at != ends_.begin() && std::prev(at)->second >= first) --at;
    while (at != ends_.end() && at->first <= end) first = std::min(first, at->first), end = std::max(end, at->second), at = ends_.erase(at);
    ends_[first] = end;
  }
  void add(const Intervals& others) {
    for (const auto& [first, end] : others.ends_) add(first, end);
  }
  bool meets(uint64_t first, uint64_t end) const {
    const auto at = ends_.lower_bound(end);
    return at != ends_.begin() && std::prev(at)->second > first;
  }

 private:
  std::map<uint64_t, uint64_t> ends_;
};

// What a kernel's copies read and write; those of kernels that begin beside one another together.
struct Touched {
  Intervals read, written;
};
struct Kernel {
  Touched touched;
  bool beside = false;         // it goes on without waiting for the kernels before it
  bool older_are_over = true;  // when the next one may begin: those before it, and before those beside it
};
Kernel last, running;
int kernels_beside = 0;

// One thread of a launch after the other on a stack of its own. ucontext only starts it: swapcontext would ask the kernel for the mask of
// signals at every switch, which took longer than all that the threads compute.
struct Fiber {
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  jmp_buf at;  // where it goes on
  bool started = false;
};
std::deque<Fiber> fibers;
jmp_buf scheduler;

__attribute__((noinline)) void to_scheduler(Fiber& from) {
  if (!_setjmp(from.at)) _longjmp(scheduler, 1);
}
void run_thread();
void run_threads() {
  for (;;) run_thread(), to_scheduler(fibers[current->fiber]);
}
void start(Fiber& fiber) {
  static ucontext_t unused;
  ucontext_t first;
  getcontext(&first);
  first.uc_stack = {.ss_sp = fiber.stack, .ss_flags = 0, .ss_size = kStackBytes};
  makecontext(&first, run_threads, 0);
  fiber.started = true;
  swapcontext(&unused, &first);
}
__attribute__((noinline)) void to_fiber(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  start(fiber);
}

std::string describe(const Block& b) {
  std::ostringstream text;
  text << "block " << b.index.x;
  if (b.index.y) text << "," << b.index.y;
  return text.str();
}

void run_thread() {
  Thread& t = *current;
  try {
    (*body_of_launch)();
    t.block->waited |= t.waited;
    check(t.waited || t.beside || !overlapped, "a thread ends without having waited for earlier kernels");
    check(t.block->waited || t.block->live > 1 || !overlapped, "a block ends without having waited for earlier kernels");
    check(t.products.empty(), "a thread ends with wgmma products that it has not waited for");
    check(t.stores.empty(), "a thread ends with bulk stores that it has not waited for");
    check(t.copies.empty(), "a thread ends with copies to shared memory that it has not waited for");
  } catch (const std::exception& error) {
    if (failure.empty()) failure = error.what();
  }
  t.done = true;
  Block& b = *t.block;
  --b.live, --b.cluster->live;
  for (auto [meeting, live] : {std::pair<Meeting*, int>(&b.all, b.live), {b.cluster, b.cluster->live}})
    if (meeting->arrived && meeting->arrived >= live) meeting->arrived = 0, ++meeting->generation;  // those that ended count as arrived
}

std::string describe(const Block& b, const Wait& w);

std::string describe_hang(const std::vector<Thread*>& threads) {
  std::map<std::string, int> waits;
  for (const Thread* t : threads)
    if (!t->done) ++waits[describe(*t->block) + " warp " + std::to_string(t->number / 32) + ": " + describe(*t->block, t->wait)];
  std::string text = "the kernel hangs:";
  for (const auto& [action, count] : waits) text += "\n  " + action + " (" + std::to_string(count) + " threads)";
  return text;
}

// Threads that have not ended stay where they are: their fibers begin anew.
[[noreturn]] void fail(const std::string& text) {
  for (Fiber& fiber : fibers) fiber.started = false;
  throw Fault(text);
}

void run_all(std::vector<Thread*> threads) {
  unsigned random = seed;
  if (seed)
    for (size_t i = threads.size() - 1; i > 0; --i) std::swap(threads[i], threads[(random = random * 1664525u + 1013904223u) / 65536 % (i + 1)]);
  while (fibers.size() < threads.size()) fibers.emplace_back();
  for (size_t i = 0; i < threads.size(); ++i) threads[i]->fiber = i;
  for (size_t left = threads.size(); left;) {
    bool progress = false;
    for (Thread* t : threads) {
      if (t->done || !t->wait.over()) continue;
      progress = true;
      t->wait = {};
      current = t;
      to_fiber(fibers[t->fiber]);
      current = nullptr;
      if (!failure.empty()) fail(failure);
      left -= t->done;
    }
    if (!progress) fail(describe_hang(threads));
  }
}

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};

// One wave of clusters, from linear block number `first` on.
void run_wave(const Config& c, unsigned first, unsigned count) {
  const int threads = c.block.x * c.block.y * c.block.z;
  std::vector<Block> blocks(count);
  std::vector<Cluster> clusters(count / c.cluster);
  std::vector<std::unique_ptr<uint8_t, Free>> shared;
  std::vector<Thread*> all;
  const size_t bytes = (c.shared_bytes + kGuardBytes + 1023) / 1024 * 1024;
  for (unsigned i = 0; i < count; ++i) {
    Block& b = blocks[i];
    const unsigned number = first + i;
    b.index = {number % c.grid.x, number / c.grid.x % c.grid.y, number / c.grid.x / c.grid.y};
    b.rank = i % c.cluster, b.cluster = &clusters[i / c.cluster];
    b.cluster->blocks.push_back(&b), b.cluster->live += threads;
    shared.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(1024, bytes)));
    b.shared = shared.back().get(), b.shared_bytes = c.shared_bytes;
    std::memset(b.shared, 0xFF, c.shared_bytes);
    std::memset(b.shared + c.shared_bytes, kGuard, bytes - c.shared_bytes);
    b.threads.resize(threads), b.warps.resize((threads + 31) / 32), b.warpgroups.resize((threads + 127) / 128), b.live = threads;
    for (int t = 0; t < threads; ++t) {
      Thread& thread = b.threads[t];
      thread.index = {t % c.block.x, t / c.block.x % c.block.y, t / c.block.x / c.block.y};
      thread.number = t, thread.block = &b;
      all.push_back(&thread);
    }
  }
  run_all(std::move(all));
  for (const Block& b : blocks)
    for (size_t i = c.shared_bytes; i < bytes; ++i)
      if (b.shared[i] != kGuard) throw Fault(describe(b) + " wrote behind the end of its shared memory, at +" + std::to_string(i));
}

}  // namespace

void fault(const std::string& text) {
  if (!current) throw Fault(text);
  throw Fault(describe(*current->block) + " thread " + std::to_string(current->number) + ": " + text);
}

Warp& Thread::warp() const { return block->warps[number / 32]; }

void wait(const Wait& w) {
  Thread& t = *current;
  t.wait = w;
  if (t.wait.over()) return void(t.wait = {});
  to_scheduler(fibers[t.fiber]);
}

void yield() { to_scheduler(fibers[current->fiber]); }

const uint64_t* exchange(uint64_t value, const char* action) {
  Warp& warp = current->warp();
  uint64_t* values = warp.values[warp.generation & 1];
  values[current->lane()] = value;
  meet(warp, 32, action, [] {});
  return values;
}

void launch(const Config& c, const std::function<void()>& body) {
  const uint64_t blocks = uint64_t{c.grid.x} * c.grid.y * c.grid.z, resident = kMultiprocessors / c.cluster * c.cluster;
  check(blocks > 0 && c.grid.x % c.cluster == 0 && resident > 0, "a grid of ", blocks, " blocks in clusters of ", c.cluster);
  check(c.block.x * c.block.y * c.block.z <= 1024 && c.shared_bytes <= kSharedLimit, "a block of ", c.block.x, " threads, ", c.shared_bytes,
        " bytes of shared memory");
  check(!current, "a kernel launches a kernel");
  gridDim = c.grid, blockDim = c.block, body_of_launch = &body, overlapped = c.overlapped;
  failure.clear();
  last = std::move(running), running = {};
  for (uint64_t first = 0; first < blocks; first += resident) run_wave(c, first, std::min(resident, blocks - first));
  if (!running.beside) return;
  ++kernels_beside;
  running.touched.read.add(last.touched.read), running.touched.written.add(last.touched.written);
  running.older_are_over = last.older_are_over;
}

void begin_beside() {
  check(last.older_are_over, "begins beside a kernel that may not have waited for those before it");
  current->beside = running.beside = true;
}

void let_next_begin() {
  if (overlapped && !current->waited && !running.beside) running.older_are_over = false;
}

uint32_t shared_address(const void* pointer) {
  const Block& b = *current->block;
  const ptrdiff_t offset = static_cast<const uint8_t*>(pointer) - b.shared;
  check(offset >= 0 && offset < static_cast<ptrdiff_t>(b.shared_bytes), "a pointer is not into the block's shared memory");
  return kSharedBase + static_cast<uint32_t>(offset);
}

uint8_t* shared_pointer(Block& block, uint32_t address, size_t bytes) {
  check(address >= kSharedBase && address - kSharedBase + bytes <= block.shared_bytes, bytes, " bytes at shared address ", address,
        " are outside of the block's ", block.shared_bytes);
  check(block.live > 0, "the block whose shared memory is used has ended");
  return block.shared + (address - kSharedBase);
}

void* variable_of_block(const void* key, size_t bytes) {
  auto& memory = current->block->variables[key];
  if (memory.empty()) memory.assign((bytes + 7) / 8, ~uint64_t{0});
  return memory.data();
}

void check_memory(uint64_t address, uint64_t bytes, const char* action, bool writes) {
  check(!current || current->waited || current->beside || !overlapped, action, " before the thread has waited for earlier kernels");
  if (current) {
    const uint64_t end = address + bytes;
    if (running.beside) {
      check(!last.touched.written.meets(address, end), action, " of what a kernel beside this one writes");
      check(!writes || !last.touched.read.meets(address, end), action, " to what a kernel beside this one reads");
    }
    (writes ? running.touched.written : running.touched.read).add(address, end);
  }
  for (const auto& [first, end] : memory)
    if (address >= first && address + bytes <= end) return;
  check(false, action, " of ", bytes, " bytes at ", reinterpret_cast<void*>(address), " is outside of every buffer");
}

}  // namespace emulation

#include "barrier.h"

namespace emulation {

bool Wait::over() const { return barrier ? phase_over(*barrier, parity) : !meeting || meeting->generation != generation; }

namespace {
std::string describe(const Block& b, const Wait& w) {
  if (!w.barrier) return std::string(w.action);
  std::ostringstream text;
  text << "mbarrier at +" << reinterpret_cast<const uint8_t*>(w.barrier) - b.shared << ", parity " << w.parity << " (" << bits_of(*w.barrier) << ")";
  return text.str();
}
}  // namespace

}  // namespace emulation

// For the tests, through ctypes.
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void emulation_clear_memory() { emulation::memory.clear(); }
EXPORT void emulation_add_memory(uint64_t address, uint64_t bytes) { emulation::memory.emplace_back(address, address + bytes); }
// How many have gone on beside the kernel before them.
EXPORT int emulation_kernels_beside() { return emulation::kernels_beside; }
// In which order the threads of a block take their turns: 0 for that of their numbers.
EXPORT void emulation_set_seed(unsigned seed) { emulation::seed = seed; }
