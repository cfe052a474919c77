// SPDX-License-Identifier: Apache-2.0
#include "fusible/independent.h"

#include <algorithm>
#include <utility>

#include "fusible/grouped_gemm.h"

namespace fusible {
namespace {

// The memory of launches that may still run when the next one begins. The caller holds the GIL, so threads take turns.
struct Running {
  Touched touched;
  int device = -1;
  cudaStream_t stream = nullptr;
  uint64_t launch = 0;  // the last of them
};
Running running;
uint64_t launches = 0;

void add(std::vector<Range>& to, const void* data, int64_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  if (data) to.push_back({first, first + bytes});
}

void add(std::vector<Range>& to, const MatrixView& m, int64_t count, int64_t rows, int64_t columns) {
  const int64_t element = bytes_of(m.type), matrix = (rows - 1) * m.pitch + columns;
  if (m.addresses.empty()) return add(to, m.data, ((count - 1) * m.group_stride + matrix) * element);
  for (const uintptr_t address : m.addresses) add(to, reinterpret_cast<const void*>(address), matrix * element);
}

bool meet(const std::vector<Range>& some, const std::vector<Range>& others) {
  return std::ranges::any_of(some, [&](const Range& a) {
    return std::ranges::any_of(others, [&](const Range& b) { return a.first < b.end && b.first < a.end; });
  });
}

}  // namespace

Touched touched_by(const GroupedGemm& call) {
  const GemmProblem& p = call.problem;
  const EpilogueArguments& e = call.epilogue;
  const bool is_wgrad = p.layout == Layout::kTN, is_nt = p.layout == Layout::kNT;
  Touched touched;
  std::vector<Range>& read = touched.read;
  add(read, call.sizes.sizes, p.groups * (call.sizes.int64_sizes ? 8 : 4));
  add(read, call.a, 1, p.tokens, is_wgrad ? p.m : p.k);
  if (is_wgrad) add(read, call.b, 1, p.tokens, p.n);
  else add(read, call.b, p.groups, is_nt ? p.n : p.k, is_nt ? p.k : p.n);
  if (p.second_k) {
    add(read, call.second_a, 1, p.tokens, p.second_k);
    add(read, call.second_b, p.groups, is_nt ? p.n : p.second_k, is_nt ? p.second_k : p.n);
  }
  add(read, e.bias, 1, p.groups, p.n);
  for (const float* numbers : {e.row_scale, e.bias_scale}) add(read, numbers, p.tokens * int64_t{sizeof(float)});
  for (const float* numbers : {e.alphas, call.betas}) add(read, numbers, p.groups * int64_t{sizeof(float)});
  add(touched.written, call.out, is_wgrad ? p.groups : 1, is_wgrad ? p.m : p.tokens, p.n);
  add(touched.written, call.workspace, std::max(call.workspace_bytes, workspace_bytes(p.groups)));
  return touched;
}

void count_launch() { ++launches; }

bool begins_beside(const Touched& touched, int device, cudaStream_t stream) {
  const Touched& others = running.touched;
  return running.launch && running.launch + 1 == launches && running.device == device && running.stream == stream &&
         !meet(touched.written, others.written) && !meet(touched.written, others.read) &&
         !meet(touched.read, others.written);
}

void let_follow(Touched touched, bool beside, int device, cudaStream_t stream) {
  if (beside) {
    touched.read.insert(touched.read.end(), running.touched.read.begin(), running.touched.read.end());
    touched.written.insert(touched.written.end(), running.touched.written.begin(), running.touched.written.end());
  }
  running = {std::move(touched), device, stream, launches};
}

}  // namespace fusible
