// SPDX-License-Identifier: Apache-2.0
#include "fusible/grouped_gemm.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/gemm_launch.h"
#include "fusible/independent.h"
#include "fusible/overlapping_launch.h"
#include "fusible/wrong_sizes.h"
#include "kernels/gemm/prepare.h"
#include "kernels/quantize/scale_groups.h"

namespace fusible {
namespace {

// The same matrices as one tensor, if they lie at equal distances.
MatrixView as_strided(MatrixView m) {
  const auto at = m.addresses;
  if (at.empty()) return m;
  const int64_t step = at.size() > 1 ? static_cast<int64_t>(at[1] - at[0]) : 16;
  bool equal = step > 0 && step < (int64_t{1} << 40) && step % bytes_of(m.type) == 0;
  for (size_t g = 0; equal && g < at.size(); ++g) equal = at[g] == at[0] + g * step;
  m.data = reinterpret_cast<const void*>(equal ? at[0] : std::ranges::min(at));
  if (equal) m.group_stride = step / bytes_of(m.type), m.addresses = {};
  return m;
}

// The coordinates of matrices at arbitrary addresses.
std::vector<GroupCoordinate> coordinates_of(const MatrixView& m) {
  std::vector<GroupCoordinate> coordinates;
  coordinates.reserve(m.addresses.size());
  for (const uintptr_t address : m.addresses) {
    const uintptr_t distance = (address - reinterpret_cast<uintptr_t>(m.data)) / kNearBytes;
    coordinates.push_back(
        {static_cast<int>(distance & ((uintptr_t{1} << kNearBits) - 1)), static_cast<int>(distance >> kNearBits)});
  }
  return coordinates;
}

void check_matrix(const char* name, const MatrixView& m, const GemmProblem& p) {
  const int64_t step = 16 / bytes_of(m.type);
  FUSIBLE_CHECK(m.addresses.empty() || static_cast<int64_t>(m.addresses.size()) == p.groups, name, " has ",
                m.addresses.size(), " addresses. ", p);
  uintptr_t bits = reinterpret_cast<uintptr_t>(m.data);
  for (const uintptr_t address : m.addresses) bits |= address;
  FUSIBLE_CHECK(bits % 16 == 0, name, " is not aligned to 16 bytes. ", p);
  FUSIBLE_CHECK(m.pitch % step == 0 && m.group_stride % step == 0, name, " has a row pitch of ", m.pitch,
                " and a group stride of ", m.group_stride, " elements; both must be multiples of 16 bytes. ", p);
}

int k_blocks(const GemmProblem& p, int64_t k) { return static_cast<int>(blocks_of(k, tile_k(p.operand))); }

void set_maps(GemmParams& params, const GroupedGemm& call, const TileVariant& tile) {
  const GemmProblem& p = call.problem;
  if (p.layout == Layout::kTN) {
    params.a = ragged_depth_map(call.a, p.tokens, p.m);
    params.b = ragged_depth_map(call.b, p.tokens, p.n);
    params.out = weight_output_map(call.out, p.groups, p.m, p.n);
  } else {
    const int64_t groups = call.run.count ? call.run.count : p.groups;
    params.a = token_rows_map(call.a, p.tokens, p.k, tile.token_box());
    params.b = p.layout == Layout::kNT ? weight_rows_map(call.b, groups, p.n, p.k, tile.tile_n)
                                       : weight_columns_map(call.b, groups, p.k, p.n, tile.tile_n);
    params.out = token_output_map(call.out, p.tokens, p.n, tile.smem_out_rows());
  }
}

GemmParams make_shape(const GroupedGemm& call, const GemmConfig& config, const Workspace& workspace) {
  const GemmProblem& p = call.problem;
  const TileVariant& tile = config.tile();
  GemmParams params{};
  if (p.layout != Layout::kTN) params.k_blocks = k_blocks(p, p.k) + k_blocks(p, p.second_k);
  params.shape = {.sizes = call.sizes,
                  .first_group = call.run.first,
                  .tokens = static_cast<int>(p.tokens),
                  .fixed_rows = static_cast<int>(p.m),
                  .columns = static_cast<int>(blocks_of(p.n, tile.tile_n)),
                  .narrow_end = (p.n - 1) % tile.tile_n < tile.tile_n * 2 / 3,
                  .skip_empty = call.accumulate && !call.epilogue.bias.data,
                  .may_halve = config.may_halve,
                  .may_split = workspace.split_k.sums && workspace.counter,
                  .counter = workspace.counter,
                  .coordinates = workspace.coordinates};
  params.shape.sizes.wrong = wrong_size_word(current_device());
  params.epilogue = {.bias = call.epilogue.bias.data,
                     .biases = workspace.biases,
                     .bias_type = call.epilogue.bias.type,
                     .columns = static_cast<int>(p.n),
                     .bias_pitch = call.epilogue.bias.pitch,
                     .row_scale = call.epilogue.row_scale,
                     .bias_scale = call.epilogue.bias_scale,
                     .alphas = call.epilogue.alphas,
                     .alpha = call.epilogue.alpha};
  params.accumulate = call.accumulate;
  params.fetch_all = p.output != DType::kFloat32 || bytes_alone_decide(p);
  params.split_k = workspace.split_k;
  return params;
}

// A kernel may use more than 48 KB of shared memory only after its limit is raised; once per kernel and device.
void allow_shared_memory(const KernelEntry& kernel, int device, const GemmProblem& problem, const GemmConfig& config) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  const std::lock_guard lock(mutex);
  if (done.contains({kernel.function, device})) return;
  FUSIBLE_CUDA_CHECK(
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes), problem,
      ": ", config);
  done.insert({kernel.function, device});
}

// The rows of the call's outputs that belong to no group.
Tail tail_of(const GroupedGemm& call) {
  const int64_t element = bytes_of(call.out.type);
  return {{const_cast<void*>(call.out.data), call.problem.tokens, call.problem.n * element, call.out.pitch * element},
          call.sizes};
}

bool may_split(const GroupedGemm& call) {
  return call.workspace && call.workspace_bytes >= bytes_of_split_k(call.problem.groups);
}

Workspace workspace_of(const GroupedGemm& call) {
  if (!call.workspace) return {};
  const int64_t groups = call.problem.groups;
  return may_split(call) ? lay_out_split_k(call.workspace, groups) : lay_out(call.workspace, groups);
}

// The memory that must be zero before the call.
std::vector<Counters> counters_of(const Workspace& workspace, int64_t groups) {
  if (!workspace.counter) return {};
  if (!workspace.split_k.arrived) return {{workspace.counter, windows_of(groups)}};
  return {{workspace.counter, windows_of(groups)}, {workspace.split_k.arrived, kArrivedCounters}};
}

// The workspace of this launch, filled; null for unneeded parts.
Workspace fill_workspace(const GroupedGemm& call, const GemmConfig& config, cudaStream_t stream) {
  const GemmProblem& p = call.problem;
  const std::vector<GroupCoordinate> coordinates = coordinates_of(p.layout == Layout::kTN ? call.out : call.b);
  const auto biases = call.epilogue.bias.addresses;
  FUSIBLE_CHECK(call.workspace || (coordinates.empty() && biases.empty()),
                "matrices at any addresses need a workspace. ", p);
  Workspace workspace = workspace_of(call);
  if (!config.on_demand) workspace.counter = nullptr;
  if (coordinates.empty()) workspace.coordinates = nullptr;
  if (biases.empty()) workspace.biases = nullptr;
  if (workspace.coordinates || workspace.biases)
    FUSIBLE_CUDA_CHECK(prepare(workspace, coordinates, biases, stream), p, ": ", config);
  if (call.zeroed || (call.follows && !call.zero_tail)) return workspace;
  Zeroing zeroing;
  zeroing.counters = counters_of(workspace, p.groups);
  for (const uintptr_t follower : call.followers)
    if (!call.follows)
      zeroing.counters.push_back({lay_out(reinterpret_cast<void*>(follower), p.groups).counter, windows_of(p.groups)});
  if (call.zero_tail) zeroing.tails = {tail_of(call)};
  zero(zeroing, current_device(), stream);
  return workspace;
}

// Scales the output by beta before the product is added.
void apply_beta(const GroupedGemm& call, const GemmParams& params, int device, cudaStream_t stream) {
  const GemmProblem& p = call.problem;
  const ScaleGroups scale{.out = const_cast<void*>(call.out.data),
                          .type = call.out.type,
                          .pitch = call.out.pitch,
                          .group_stride = call.out.group_stride,
                          .columns = p.n,
                          .coordinates = p.layout == Layout::kTN ? params.shape.coordinates : nullptr,
                          .sizes = call.sizes,
                          .tokens = p.tokens,
                          .fixed_rows = p.layout == Layout::kTN ? p.m : 0,
                          .betas = call.betas,
                          .beta = call.beta};
  FUSIBLE_CUDA_CHECK(scale_groups(scale, device_properties(device).multiprocessors, stream), "beta of ", p);
}

}  // namespace

int64_t workspace_bytes(int64_t groups) { return bytes_of_workspace(groups); }
int64_t split_k_workspace_bytes(int64_t groups) { return bytes_of_split_k(groups); }

void zero_before(GroupedGemm& call, Zeroing& zeroing) {
  const std::vector<Counters> counters = counters_of(workspace_of(call), call.problem.groups);
  if (!counters.empty() && std::ranges::count(zeroing.counters, counters[0].first, &Counters::first))
    return;  // a call before has set it, and leaves it unchanged then
  zeroing.counters.insert(zeroing.counters.end(), counters.begin(), counters.end());
  if (call.zero_tail) zeroing.tails.push_back(tail_of(call));
  call.zeroed = true;
}

GroupedGemm as_strided(const GroupedGemm& wanted) {
  GroupedGemm call = wanted;
  call.b = as_strided(call.b), call.out = as_strided(call.out), call.epilogue.bias = as_strided(call.epilogue.bias);
  if (!wanted.epilogue.bias.addresses.empty()) call.epilogue.bias.pitch = call.epilogue.bias.group_stride;
  return call;
}

void check_device(const GemmProblem& p, int device) {
  const DeviceProperties& properties = device_properties(device);
  FUSIBLE_CHECK(properties.major == 9 && properties.minor == 0, "device ", device, " (", properties.name,
                ") has capability ", properties.major, ".", properties.minor, "; these kernels are for 9.0. ", p);
  FUSIBLE_CHECK(p.groups >= 1 && p.groups <= kMaxGroups, "1 to ", kMaxGroups, " groups are possible. ", p);
}

namespace {

void check_second_pair(const GroupedGemm& call) {
  const GemmProblem& p = call.problem;
  FUSIBLE_CHECK(p.layout != Layout::kTN && p.output == p.operand && p.second_k > 0 && p.second_k % 8 == 0,
                "a second pair needs rows of tokens in the operands' type, and a depth that is a multiple of 8. ", p);
  FUSIBLE_CHECK(call.second_a.type == p.operand && call.second_b.type == p.operand && call.second_b.addresses.empty(),
                "a second pair has the type of the first, and weights that are one tensor. ", p);
  check_matrix("second_a", call.second_a, p);
  check_matrix("second_b", call.second_b, p);
}

}  // namespace

void check_shapes(const GroupedGemm& call, int device) {
  const GemmProblem& p = call.problem;
  check_device(p, device);
  FUSIBLE_CHECK(p.tokens >= 0 && p.tokens < (1 << 30), "the token buffer must have fewer than 2^30 rows. ", p);
  FUSIBLE_CHECK(p.n > 0 && p.n % 8 == 0, "n must be a positive multiple of 8. ", p);
  FUSIBLE_CHECK(p.layout == Layout::kTN ? p.m > 0 && p.m % 8 == 0 : p.k > 0 && p.k % 8 == 0,
                "m and k must be positive multiples of 8. ", p);
  FUSIBLE_CHECK(p.layout != Layout::kTN || !(call.epilogue.row_scale || call.epilogue.bias_scale),
                "a weight gradient has no rows to scale. ", p);
  FUSIBLE_CHECK(call.sizes.sizes && call.sizes.groups == p.groups, "the sizes of the groups are not given. ", p);
  FUSIBLE_CHECK(!call.zero_tail || p.layout != Layout::kTN, "only rows of groups have a tail. ", p);
  check_matrix("a", call.a, p);
  check_matrix("b", call.b, p);
  check_matrix("out", call.out, p);
  if (p.second_k) check_second_pair(call);
}

void check(const GroupedGemm& call, int device) {
  const GemmProblem& p = call.problem;
  FUSIBLE_CHECK((p.operand == DType::kFloat16 || p.operand == DType::kBFloat16) && call.a.type == p.operand &&
                    call.b.type == p.operand,
                "operands must be both bf16 or both fp16. ", p);
  FUSIBLE_CHECK((p.output == p.operand || p.output == DType::kFloat32) && call.out.type == p.output,
                "output must be fp32 or of the operands' type. ", p);
  check_shapes(call, device);
}

void zero_output(const GroupedGemm& call, cudaStream_t stream) {
  const GemmProblem& p = call.problem;
  const size_t element = bytes_of(p.output);
  for (int64_t group = 0; group < p.groups; ++group) {
    const uintptr_t out = call.out.addresses.empty()
                              ? reinterpret_cast<uintptr_t>(call.out.data) + group * call.out.group_stride * element
                              : call.out.addresses[group];
    FUSIBLE_CUDA_CHECK(
        cudaMemset2DAsync(reinterpret_cast<void*>(out), call.out.pitch * element, 0, p.n * element, p.m, stream), p);
  }
}

GemmParams prepare_shape(const GroupedGemm& call, const GemmConfig& config, cudaStream_t stream) {
  return make_shape(call, config, fill_workspace(call, config, stream));
}

GemmParams prepare_params(const GroupedGemm& call, const GemmConfig& config, cudaStream_t stream) {
  GemmParams params = prepare_shape(call, config, stream);
  set_maps(params, call, config.tile());
  return params;
}

SecondPair second_pair(const GroupedGemm& call, const GemmConfig& config) {
  const GemmProblem& p = call.problem;
  const TileVariant& tile = config.tile();
  if (!p.second_k) return {};
  return {.a = token_rows_map(call.second_a, p.tokens, p.second_k, tile.token_box()),
          .b = p.layout == Layout::kNT ? weight_rows_map(call.second_b, p.groups, p.n, p.second_k, tile.tile_n)
                                       : weight_columns_map(call.second_b, p.groups, p.second_k, p.n, tile.tile_n),
          .k_blocks = k_blocks(p, p.k),
          .short_end = (p.second_k - 1) % tile_k(p.operand) < tile_k(p.operand) / 4};
}

namespace {

void launch_window(const GemmParams& params, const KernelEntry& kernel, const GemmConfig& config,
                   const GemmProblem& problem, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(config.tile().cluster()), 1, 1};
  cudaLaunchAttribute attributes[] = {cluster, overlapping()};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(config.grid);
  launch.blockDim = dim3(kernel.threads);
  launch.dynamicSmemBytes = kernel.shared_bytes;
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = 2;
  void* arguments[] = {const_cast<GemmParams*>(&params)};
  FUSIBLE_CUDA_CHECK(cudaLaunchKernelExC(&launch, kernel.function, arguments), problem, ": ", config, ", ",
                     kernel.shared_bytes, " bytes of shared memory");
}

}  // namespace

void launch(GemmParams& params, const KernelEntry& kernel, const GemmConfig& config, const GemmProblem& problem,
            int device, cudaStream_t stream, GroupWindow run) {
  allow_shared_memory(kernel, device, problem, config);
  if (!run.count) run = {0, params.shape.sizes.groups};
  const Neighbours neighbours = params.neighbours;
  unsigned* const counters = params.shape.counter;
  for (int before = 0; before < run.count; before += kGroupsOfWindow) {
    const int count = std::min(run.count - before, kGroupsOfWindow);
    params.shape.window = {run.first + before, count};
    params.shape.counter = counters ? counters + before / kGroupsOfWindow : nullptr;
    params.neighbours = {.beside = neighbours.beside && before == 0,
                         .followed = neighbours.followed && before + count == run.count};
    launch_window(params, kernel, config, problem, stream);
  }
  params.neighbours = neighbours;
}

namespace {

void check_run(const GroupedGemm& call) {
  const auto [first, count] = call.run;
  const GemmProblem& p = call.problem;
  FUSIBLE_CHECK(!count || (p.layout != Layout::kTN && call.b.addresses.empty() && first >= 0 && count > 0 &&
                           first + count <= p.groups),
                "there is no run of ", count, " groups from ", first, " on. ", p);
}

}  // namespace

void grouped_gemm(const GroupedGemm& wanted, int device, cudaStream_t stream) {
  const GroupedGemm call = as_strided(wanted);
  check(call, device), check_run(call);
  const GemmProblem& p = call.problem;
  FUSIBLE_CHECK(call.variant < kTileVariantCount, "there is no tile variant ", call.variant, ". ", p);
  const DeviceGuard guard(device);
  if (p.tokens == 0) {
    FUSIBLE_CHECK(p.layout != Layout::kTN || !(call.epilogue.bias.data || call.betas || call.beta != 1),
                  "no tokens: bias and beta need them. ", p);
    if (p.layout == Layout::kTN && !call.accumulate) zero_output(call, stream);
    return;
  }
  const GemmConfig config = choose_config(p, device_properties(device).multiprocessors, call.variant, may_split(call));
  FUSIBLE_CHECK(is_built(p.layout, config.tile(), p.output == DType::kFloat32, p.scale_bias) &&
                    (!p.second_k || std::ranges::count(kPairVariants, config.variant)),
                "tile variant ", config.variant, " is not built for it. ", p);
  WithSecondPair<GemmParams> params{prepare_params(call, config, stream), second_pair(call, config)};
  const bool scales_before = call.accumulate && (call.betas || call.beta != 1);
  if (scales_before) apply_beta(call, params, device, stream);
  const bool brings_addresses = params.shape.coordinates || params.epilogue.biases,
             zeroes = call.zero_tail && !call.zeroed;
  const bool is_alone = !scales_before && !brings_addresses && !zeroes;
  Touched touched;
  if (call.follows || !call.followers.empty()) touched = touched_by(call);
  params.neighbours = {.beside = call.follows && is_alone && begins_beside(touched, device, stream),
                       .followed = !call.followers.empty()};
  launch(params, find_kernel(p, config.variant), config, p, device, stream, call.run);
  if (params.neighbours.followed) let_follow(std::move(touched), params.neighbours.beside, device, stream);
}

}  // namespace fusible
