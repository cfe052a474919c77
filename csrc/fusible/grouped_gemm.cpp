#include "fusible/grouped_gemm.h"

#include <mutex>
#include <set>
#include <utility>

#include "fusible/device.h"
#include "fusible/error.h"
#include "kernels/kernel_entry.h"

namespace fusible {
namespace {

int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

void check_matrix(const char* name, const MatrixView& m, const GemmProblem& p) {
  const int64_t step = m.type == DType::kFloat32 ? 4 : 8;
  FUSIBLE_CHECK(reinterpret_cast<uintptr_t>(m.data) % 16 == 0, name, " is not aligned to 16 bytes. ", p);
  FUSIBLE_CHECK(m.pitch % step == 0 && m.group_stride % step == 0, name, " has a row pitch of ", m.pitch, " and a group stride of ", m.group_stride,
                " elements; both must be multiples of 16 bytes. ", p);
}

void check(const GroupedGemm& call, int device) {
  const GemmProblem& p = call.problem;
  const DeviceProperties& properties = device_properties(device);
  FUSIBLE_CHECK(properties.major == 9 && properties.minor == 0, "device ", device, " (", properties.name, ") has capability ", properties.major, ".",
                properties.minor, "; these kernels are for 9.0. ", p);
  FUSIBLE_CHECK(p.groups >= 1 && p.groups <= 512, "1 to 512 groups are possible. ", p);
  FUSIBLE_CHECK(p.tokens >= 0 && p.tokens < (1 << 30), "the token buffer must have fewer than 2^30 rows. ", p);
  FUSIBLE_CHECK(p.n > 0 && p.n % 8 == 0, "n must be a positive multiple of 8. ", p);
  FUSIBLE_CHECK(p.layout == Layout::kTN ? p.m > 0 && p.m % 8 == 0 : p.k > 0 && p.k % 8 == 0, "m and k must be positive multiples of 8. ", p);
  FUSIBLE_CHECK(p.operand != DType::kFloat32 && call.a.type == p.operand && call.b.type == p.operand, "operands must be both bf16 or both fp16. ", p);
  FUSIBLE_CHECK((p.output == p.operand || p.output == DType::kFloat32) && call.out.type == p.output, "output must be fp32 or of the operands' type. ",
                p);
  FUSIBLE_CHECK(!(p.affine && p.layout == Layout::kTN), "a weight gradient takes no bias and no factors. ", p);
  FUSIBLE_CHECK(call.variant < kTileVariantCount, "there is no tile variant ", call.variant, ". ", p);
  FUSIBLE_CHECK(call.groups.sizes || call.groups.starts, "neither sizes nor offsets of the groups are given. ", p);
  check_matrix("a", call.a, p);
  check_matrix("b", call.b, p);
  check_matrix("out", call.out, p);
}

GemmParams make_params(const GroupedGemm& call, const GemmConfig& config) {
  const GemmProblem& p = call.problem;
  const TileVariant& tile = config.tile();
  GemmParams params{};
  if (p.layout == Layout::kTN) {
    params.a = ragged_depth_map(call.a, p.tokens, p.m);
    params.b = ragged_depth_map(call.b, p.tokens, p.n);
    params.out = weight_output_map(call.out, p.groups, p.m, p.n);
  } else {
    params.a = token_rows_map(call.a, p.tokens, p.k);
    params.b = p.layout == Layout::kNT ? weight_rows_map(call.b, p.groups, p.n, p.k, tile.tile_n) : weight_columns_map(call.b, p.groups, p.k, p.n, tile.tile_n);
    params.out = token_output_map(call.out, p.tokens, p.n);
    params.k_blocks = static_cast<int>(blocks_of(p.k, 64));
  }
  params.source = {.sizes = call.groups.sizes, .starts = call.groups.starts, .wide = call.groups.wide};
  params.shape = {.groups = static_cast<int>(p.groups),
                  .tokens = static_cast<int>(p.tokens),
                  .fixed_rows = static_cast<int>(p.m),
                  .columns = static_cast<int>(blocks_of(p.n, tile.tile_n)),
                  .skip_empty = call.accumulate,
                  .counter = config.on_demand ? static_cast<unsigned*>(call.workspace) : nullptr};
  params.affine = {.bias = call.affine.bias.data,
                   .bias_type = static_cast<int>(call.affine.bias.type),
                   .bias_pitch = static_cast<int>(call.affine.bias.pitch),
                   .columns = static_cast<int>(p.n),
                   .row_scale = call.affine.row_scale,
                   .bias_scale = call.affine.bias_scale,
                   .alphas = call.affine.alphas,
                   .alpha = call.affine.alpha};
  params.accumulate = call.accumulate;
  return params;
}

// A kernel may use more than 48 KB of shared memory only after its limit is raised; once per kernel and device.
void allow_shared_memory(const KernelEntry& kernel, int device, const GemmProblem& problem, const GemmConfig& config) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  const std::lock_guard lock(mutex);
  if (done.contains({kernel.function, device})) return;
  FUSIBLE_CUDA_CHECK(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes), problem, ": ", config);
  done.insert({kernel.function, device});
}

// Nothing to compute: the weight gradients of empty groups are zero.
void clear_output(const GroupedGemm& call, cudaStream_t stream) {
  const GemmProblem& p = call.problem;
  const size_t element = p.output == DType::kFloat32 ? 4 : 2;
  for (int64_t group = 0; group < p.groups; ++group) {
    char* out = static_cast<char*>(const_cast<void*>(call.out.data)) + group * call.out.group_stride * element;
    FUSIBLE_CUDA_CHECK(cudaMemset2DAsync(out, call.out.pitch * element, 0, p.n * element, p.m, stream), p);
  }
}

}  // namespace

void grouped_gemm(const GroupedGemm& call, int device, cudaStream_t stream) {
  check(call, device);
  const GemmProblem& p = call.problem;
  const DeviceGuard guard(device);
  if (p.tokens == 0) {
    if (p.layout == Layout::kTN && !call.accumulate) clear_output(call, stream);
    return;
  }
  const GemmConfig config = choose_config(p, device_properties(device).multiprocessors, call.variant);
  const KernelEntry kernel = find_kernel(p, config.variant);
  allow_shared_memory(kernel, device, p, config);
  GemmParams params = make_params(call, config);

  if (params.shape.counter) FUSIBLE_CUDA_CHECK(cudaMemsetAsync(params.shape.counter, 0, kWorkspaceBytes, stream), p, ": ", config);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(config.tile().cluster()), 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(config.grid);
  launch.blockDim = dim3(kernel.threads);
  launch.dynamicSmemBytes = kernel.shared_bytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  void* arguments[] = {&params};
  FUSIBLE_CUDA_CHECK(cudaLaunchKernelExC(&launch, kernel.function, arguments), p, ": ", config, ", ", kernel.shared_bytes, " bytes of shared memory");
}

}  // namespace fusible
