// SPDX-License-Identifier: Apache-2.0
// Preparation of the product of groups of any shapes: the addresses of each group's matrices, their maps, and the
// scaling of the output by beta.
#include <algorithm>

#include "device/gemm/groups.cuh"
#include "device/ptx/element.cuh"
#include "device/ptx/map_update.cuh"
#include "kernels/ragged/ragged.h"

namespace fusible {
namespace {

constexpr int kThreads = 512,
              kWarps = kThreads / 32;  // a thread a group for the sums, by rounds; then a warp a group for the maps

__device__ int64_t dim_of(const Dims& dims, int group) {
  constexpr int64_t kMost = (1ll << 31) - 1;
  return dims.sizes.sizes ? clamped_size(dims.sizes, group, kMost) : min(max(dims.uniform, int64_t{0}), kMost);
}

// The sums of the groups of earlier rounds, in shared memory.
struct SumsBefore {
  long long a, b, out, tasks, misfits;
};

// Sum over this thread and all before it; by all threads of the block. `before`, that of the rounds before, becomes
// that before the next round, which reads it behind other sums.
__device__ int64_t scan_block(int64_t x, long long& before) {
  __shared__ long long totals[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = scan(x, lane);
  if (lane == 31) totals[warp] = x;
  __syncthreads();
  x += before;
  for (int i = 0; i < warp; ++i) x += totals[i];
  __syncthreads();
  if (threadIdx.x == kThreads - 1) before = x;
  return x;
}

// A matrix of this thread's group.
struct Packed {
  int64_t rows, columns, start;
  bool fits;
};
__device__ Packed find(int64_t rows, int64_t columns, int64_t capacity, long long& before) {
  const int64_t size = rows * columns, counted = min(size, capacity + 1);  // a sum that cannot overflow
  const int64_t start = scan_block(counted, before) - counted;
  return {rows, columns, start, start + size <= capacity};
}

__device__ bool reachable(const void* data, int64_t start, int64_t pitch, int element) {
  return (reinterpret_cast<uintptr_t>(data) + start * element) % 16 == 0 && pitch * element % 16 == 0;
}

__device__ int64_t stated(const Dims& dims, int group) {
  return dims.sizes.sizes ? read_index(dims.sizes.sizes, dims.sizes.int64_sizes, group) : dims.uniform;
}

// Tells the host of the first group with a negative dim, or with a matrix that ends behind the data. By all threads of
// one block, each with the matrices of its group.
__device__ void report_misfit(const RaggedParams& p, const RaggedSource& s, int g, const Packed& a, const Packed& b,
                              const Packed& out, long long& misfits) {
  int64_t size = 0;
  if (g < p.shape.sizes.groups)
    for (const Dims* dims : {&s.a.rows, &s.a.columns, &s.b.rows, &s.b.columns}) size = min(size, stated(*dims, g));
  for (const Packed* m : {&a, &b, &out})
    if (size == 0 && !m->fits) size = m->start + m->rows * m->columns;
  if (scan_block(size != 0, misfits) == 1 && size != 0) report(p.shape.sizes.wrong, {SizesOf::kMatrices, g, size});
}

// Finds group g, by one thread; `end` becomes the end of the outputs of this and all groups before it.
__device__ RaggedGroup find_group(const RaggedParams& p, const RaggedSource& s, int g, SumsBefore& before,
                                  int64_t& end) {
  const bool exists = g < p.shape.sizes.groups;
  const auto sized = [&](const PackedMatrices& m, long long& elements) {
    return find(exists ? dim_of(m.rows, g) : 0, exists ? dim_of(m.columns, g) : 0, m.elements, elements);
  };
  const Packed a = sized(s.a, before.a), b = sized(s.b, before.b);
  const bool a_transposed = s.layout == Layout::kTN, b_transposed = s.layout == Layout::kNT;
  const Packed out =
      find(a_transposed ? a.columns : a.rows, b_transposed ? b.rows : b.columns, s.out_elements, before.out);
  end = min(out.start + out.rows * out.columns, s.out_elements);
  if (blockIdx.x == 0) report_misfit(p, s, g, a, b, out, before.misfits);
  const int64_t depth = min(a_transposed ? a.rows : a.columns, b_transposed ? b.columns : b.rows);
  RaggedGroup group{.a = a.start, .b = b.start, .out = out.start};
  group.m = static_cast<int>(out.fits ? out.rows : 0), group.n = static_cast<int>(out.fits ? out.columns : 0);
  group.k = static_cast<int>(a.fits && b.fits ? depth : 0);
  group.a_pitch = static_cast<int>(a.columns), group.b_pitch = static_cast<int>(b.columns);
  if (!group.k || !reachable(p.a_data, a.start, a.columns, 2)) group.no_tma |= kNoTmaA;
  if (!group.k || !reachable(p.b_data, b.start, b.columns, 2)) group.no_tma |= kNoTmaB;
  if (!reachable(p.out_data, out.start, out.columns, s.fp32_output ? 4 : 2)) group.no_tma |= kNoTmaOut;
  const int64_t rows = (group.m + s.tile_m - 1) / s.tile_m, columns = (group.n + int64_t{s.tile_n} - 1) / s.tile_n;
  group.tasks_end = static_cast<int>(scan_block(s.skip_empty && !group.k ? 0 : rows * columns, before.tasks));
  return group;
}

struct MapOf {
  const void* data;
  int64_t start;
  int element, width, lines, pitch;
};

// Writes the map of a matrix, made from a model map. Called by a warp.
__device__ void write_map(CUtensorMap* to, CUtensorMap* shared, const CUtensorMap& model, const MapOf& m) {
  const int lane = threadIdx.x % 32;
  reinterpret_cast<uint32_t*>(shared)[lane] = reinterpret_cast<const uint32_t*>(&model)[lane];
  __syncwarp();
  if (lane == 0) {
    map_update::set_address(shared, static_cast<const char*>(m.data) + m.start * m.element);
    map_update::set_size<0>(shared, m.width);
    map_update::set_size<1>(shared, m.lines);
    map_update::set_pitch(shared, static_cast<uint64_t>(m.pitch) * m.element);
  }
  __syncwarp();
  map_update::publish(to, shared);
  __syncwarp();
}

__device__ void write_maps(const RaggedParams& p, const RaggedSource& s, const RaggedGroup& g, CUtensorMap* to,
                           CUtensorMap* shared) {
  const bool a_transposed = s.layout == Layout::kTN, b_transposed = s.layout == Layout::kNT;
  if (!g.m || !g.n) return;
  if (!(g.no_tma & kNoTmaA))
    write_map(to, shared, p.a, {p.a_data, g.a, 2, a_transposed ? g.m : g.k, a_transposed ? g.k : g.m, g.a_pitch});
  if (!(g.no_tma & kNoTmaB))
    write_map(to + 1, shared, p.b, {p.b_data, g.b, 2, b_transposed ? g.k : g.n, b_transposed ? g.n : g.k, g.b_pitch});
  if (!(g.no_tma & kNoTmaOut))
    write_map(to + 2, shared, p.out, {p.out_data, g.out, s.fp32_output ? 4 : 2, g.n, g.m, g.n});
}

// Copies edge value `i`. Called by 32 threads, one value each.
__device__ void copy_edges(const RaggedParams& p, int i) {
  const bool a = i < 16;
  const int64_t elements = a ? p.a_elements : p.b_elements;
  if (elements == 0) return;
  const auto* begin = static_cast<const uint16_t*>(a ? p.a_data : p.b_data);
  const auto* from = i / 8 % 2 ? begin + elements - 1 : begin;
  const auto* value = reinterpret_cast<const uint16_t*>(reinterpret_cast<uintptr_t>(from) / 16 * 16) + i % 8;
  reinterpret_cast<uint16_t*>(p.edges)[i] = value >= begin && value < begin + elements ? *value : 0;
}

template <class T>
__device__ void zero(void* data, int64_t from, int64_t to) {
  for (int64_t i = from + blockIdx.x * kThreads + threadIdx.x; i < to; i += gridDim.x * kThreads)
    static_cast<T*>(data)[i] = 0;
}

// Every block adds up all groups, and writes those of its own warps. Without the 3, it would take 64 registers, not 40.
__global__ void __launch_bounds__(kThreads, 3)
    prepare_ragged_kernel(const __grid_constant__ RaggedParams p, const __grid_constant__ RaggedSource s,
                          RaggedGroup* groups) {
  __shared__ __align__(128) CUtensorMap maps[kWarps];
  __shared__ RaggedGroup mine[kWarps];
  __shared__ long long last;
  __shared__ SumsBefore before;
  const int thread = threadIdx.x, first = blockIdx.x * kWarps, warp = thread / 32, count = p.shape.sizes.groups;
  if (thread == 0) before = {};
  __syncthreads();
#pragma unroll 1
  for (int round = 0; round < count; round += kThreads) {
    const int g = round + thread;
    int64_t end;
    const RaggedGroup group = find_group(p, s, g, before, end);
    if (g >= first && g < min(first + kWarps, count)) groups[g] = mine[g - first] = group;
    if (g == count - 1) last = end;
  }
  if (thread * kGroupsOfWindow < count && first == 0) p.shape.counter[thread] = 0;  // of each window
  if (thread < 32 && first == 0) copy_edges(p, thread);
  __syncthreads();
  if (first + warp < count) write_maps(p, s, mine[warp], p.maps + (first + warp) * 3, maps + warp);
  if (!s.zero_tail) return;
  if (s.fp32_output) zero<uint32_t>(p.out_data, last, s.out_elements);
  else zero<uint16_t>(p.out_data, last, s.out_elements);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_ragged_kernel(const RaggedGroup* groups, void* data, const float* betas, float all) {
  const RaggedGroup& group = groups[blockIdx.y];
  const float beta = betas ? betas[blockIdx.y] : all;
  if (beta == 1.f) return;
  T* const out = static_cast<T*>(data) + group.out;
  const int64_t size = static_cast<int64_t>(group.m) * group.n;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < size; i += gridDim.x * kThreads)
    out[i] = beta == 0.f ? static_cast<T>(0.f) : static_cast<T>(static_cast<float>(out[i]) * beta);
}

constexpr int64_t kMapBytes = 128;
static_assert(sizeof(CUtensorMap) == kMapBytes);
constexpr int64_t kCountersBytes = 32;  // one of each window, and a multiple of 16
static_assert(windows_of(kMaxGroups) * sizeof(unsigned) <= kCountersBytes);
static_assert(kCountersBytes + 4 * sizeof(uint4) <= kMapBytes);

}  // namespace

int64_t bytes_of_ragged_workspace(int64_t groups) {
  return 2 * kMapBytes + groups * (3 * kMapBytes + static_cast<int64_t>(sizeof(RaggedGroup)));
}

RaggedWorkspace lay_out_ragged(void* memory, int64_t groups) {
  char* bytes = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + kMapBytes - 1) / kMapBytes * kMapBytes);
  const auto maps = reinterpret_cast<CUtensorMap*>(bytes + kMapBytes);
  return {.counter = reinterpret_cast<unsigned*>(bytes),
          .edges = reinterpret_cast<uint4*>(bytes + kCountersBytes),
          .maps = maps,
          .groups = reinterpret_cast<RaggedGroup*>(maps + 3 * groups)};
}

cudaError_t prepare_ragged(const RaggedParams& p, const RaggedSource& s, int multiprocessors, cudaStream_t stream) {
  const int of_groups = (p.shape.sizes.groups + kWarps - 1) / kWarps,
            blocks = s.zero_tail ? std::max(of_groups, multiprocessors) : of_groups;
  prepare_ragged_kernel<<<blocks, kThreads, 0, stream>>>(p, s, const_cast<RaggedGroup*>(p.groups));
  return cudaGetLastError();
}

cudaError_t scale_ragged(const RaggedParams& p, DType type, const float* betas, float beta, int multiprocessors,
                         cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(std::max(1, 8 * multiprocessors / p.shape.sizes.groups)),
                  static_cast<unsigned>(p.shape.sizes.groups));
  dispatch_dtype(type, [&](auto constant) {
    using T = Element<decltype(constant)::value>;
    scale_ragged_kernel<T><<<grid, kThreads, 0, stream>>>(p.groups, p.out_data, betas, beta);
  });
  return cudaGetLastError();
}

}  // namespace fusible
