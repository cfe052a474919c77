// SPDX-License-Identifier: Apache-2.0
#include "fusible/wrong_sizes.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>

#include "fusible/error.h"

namespace fusible {
namespace {

constexpr int kDevices = 64, kWordsApart = 16;  // 128 bytes, so that devices do not write to one line of a cache

std::atomic<uint64_t*> words{nullptr};

// A stream under capture forbids allocations, but this one is not part of the graph.
class AllowAllocation {
 public:
  AllowAllocation() { exchange(); }
  ~AllowAllocation() { exchange(); }
  AllowAllocation(const AllowAllocation&) = delete;
  AllowAllocation& operator=(const AllowAllocation&) = delete;

 private:
  void exchange() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Portable: the same address for all devices. Never freed: kernels may write until the process ends.
uint64_t* allocate() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (uint64_t* const there = words) return there;
  const AllowAllocation allow;
  constexpr size_t kBytes = kDevices * kWordsApart * sizeof(uint64_t);
  void* memory = nullptr;
  FUSIBLE_CUDA_CHECK(cudaHostAlloc(&memory, kBytes, cudaHostAllocPortable | cudaHostAllocMapped),
                     "memory in which kernels report wrong split sizes");
  uint64_t* const zeroed = static_cast<uint64_t*>(memory);
  std::fill_n(zeroed, kDevices * kWordsApart, 0);
  words = zeroed;
  return zeroed;
}

// ops/kernels/pytorch/wrong_sizes.py says the same, for GPUs without these kernels.
std::string text(const WrongSize& wrong) {
  std::ostringstream text;
  const bool rows = wrong.sizes == SizesOf::kRows, negative = wrong.size < 0;
  text << (rows ? "split_sizes" : "first_dims or last_dims") << " on the device of an earlier call were wrong: ";
  if (rows || negative) text << (rows ? "the size" : "a dim") << " of group " << wrong.group << " is " << wrong.size;
  else text << "the matrix of group " << wrong.group << " ends at element " << wrong.size;
  text << (negative ? ", which is negative"
           : rows   ? ", more than the rows that the groups before it leave"
                    : ", and there are fewer");
  text << ". Sizes were cut to fit, so the results of that call mean nothing. fusible.config(debug=True), or "
          "FUSIBLE_DEBUG=1, checks them before each call";
  return text.str();
}

}  // namespace

uint64_t* wrong_size_word(int device) {
  if (device < 0 || device >= kDevices) return nullptr;
  uint64_t* const there = words.load(std::memory_order_acquire);
  return (there ? there : allocate()) + device * kWordsApart;
}

void raise_wrong_sizes(int device) {
  uint64_t* const there = words.load(std::memory_order_acquire);
  if (!there || device < 0 || device >= kDevices) return;
  const std::atomic_ref<uint64_t> word(there[device * kWordsApart]);
  if (word.load(std::memory_order_relaxed) == 0) return;
  if (const uint64_t reported = word.exchange(0)) fail(text(WrongSize::of(reported)).c_str());
}

}  // namespace fusible
