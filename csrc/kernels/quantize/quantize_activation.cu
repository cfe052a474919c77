// SPDX-License-Identifier: Apache-2.0
// The kernels that quantise built-in activations, and the launches of these and of users' functions.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/functions/activation.cuh"
#include "device/ptx/element.cuh"
#include "device/quantize/quantize_activation.cuh"
#include "fusible/device.h"
#include "fusible/error.h"
#include "fusible/jit_kernel.h"
#include "kernels/activation/activation_entry.h"
#include "kernels/quantize/quantize_launch.h"

namespace fusible {
namespace {

template <Halves kHalves>
struct BuiltInOfHalves {
  static constexpr int kColumns = 0, kSums = 0;
  static constexpr bool kScales = true;

  template <class Call, class Body>
  DEVICE static void choose(const Call& c, Body body) {
    if constexpr (kHalves != Halves::kNone) with_function<true>(c.activation, body);
    else with_unlimited_function<true>(c.activation, body);
  }
};

template <class T, Halves kHalves>
__global__ void __launch_bounds__(kQuantizeThreads, kForwardBlocks)
    quantize_activation_kernel(const __grid_constant__ QuantizeActivation c, int chunks) {
  quantize_activation<T, kHalves, BuiltInOfHalves<kHalves>>(c, chunks);
}

template <class T, Halves kHalves>
__global__ void __launch_bounds__(kQuantizeThreads, kBackwardBlocks)
    quantize_activation_backward_kernel(const __grid_constant__ QuantizeActivationBackward c, int chunks) {
  extern __shared__ __align__(16) char memory[];
  quantize_activation_backward<T, kHalves, BuiltInOfHalves<kHalves>>(c, chunks,
                                                                     *reinterpret_cast<BackwardShared*>(memory));
}

void allow_shared_memory(const void* kernel) {
  FUSIBLE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(BackwardShared)),
                     "shared memory of the activation's backward");
}

template <class T, Halves kHalves>
void launch_forward(const QuantizeActivation& c, const TokenTiles& tiles, cudaStream_t stream) {
  quantize_activation_kernel<T, kHalves><<<tiles.blocks, kQuantizeThreads, 0, stream>>>(c, tiles.chunks);
}

template <class T, Halves kHalves>
void launch_backward(const QuantizeActivationBackward& c, const TokenTiles& tiles, cudaStream_t stream) {
  void (*const kernel)(QuantizeActivationBackward, int) = quantize_activation_backward_kernel<T, kHalves>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel));
  kernel<<<tiles.blocks, kQuantizeThreads, sizeof(BackwardShared), stream>>>(c, tiles.chunks);
}

// Returns the tiles of the launch, and writes them to `call` with the other values derived from its sizes.
template <class Call>
TokenTiles complete(Call& call, int blocks_per_multiprocessor, int device) {
  const TokenTiles tiles =
      token_tiles(call.tokens, call.sizes.groups, call.features, blocks_per_multiprocessor, device);
  call.tiles = tiles.of_block, call.rows.scales_pitch = row_scales_pitch(call.tokens);
  return tiles;
}

// The kernel of a user's function.
template <class Call>
void launch_function(const Call& call, const ColumnVectors& vectors, float* dvector_partials, const TokenTiles& tiles,
                     int shared_bytes, cudaStream_t stream) {
  QuantizeFunction<Call> params{call, {}, dvector_partials, tiles.chunks};
  std::ranges::copy(vectors.data, params.vectors);
  const KernelEntry kernel = entry_of(call.activation.kernels[0], kQuantizeThreads, shared_bytes);
  if (shared_bytes) allow_shared_memory(kernel.function);
  FUSIBLE_CUDA_CHECK(launch(kernel, tiles.blocks, stream, params), "a function of ", call.tokens, " rows of ",
                     call.features, " features, quantised");
}

constexpr int64_t kPartialsAlignment = 16;  // bytes; there is room for it, so that the size is linear in the rows

float* partials_behind_shares(const QuantizeActivationBackward& c) {
  const int64_t blocks = blocks_of(dscale_shares_bytes(c.tokens, c.features), kPartialsAlignment);
  return c.workspace + blocks * kPartialsAlignment / static_cast<int64_t>(sizeof(float));
}

// The gradients of numbers of columns, which groups without rows have too.
void sum_dvectors(const QuantizeActivationBackward& c, std::span<const DVector> dvectors, const float* partials,
                  cudaStream_t stream) {
  ColumnSumsOfBlocks sums{.sizes = c.sizes, .tokens = static_cast<int>(c.tokens)};
  add_dvectors(sums, dvectors, partials, static_cast<int>(c.features), static_cast<int>(c.activation.block));
  sum_column_partials(sums, stream);
}

// Calls body(halves) with the layout of the activation, known to the compiler.
template <class Body>
void dispatch_halves(const Activation& a, Body body) {
  if (!a.gated) body(std::integral_constant<Halves, Halves::kNone>());
  else if (a.block < 8) body(std::integral_constant<Halves, Halves::kNarrow>());
  else body(std::integral_constant<Halves, Halves::kWide>());
}

}  // namespace

void quantize_activation(const QuantizeActivation& call, const ColumnVectors& vectors, int device,
                         cudaStream_t stream) {
  QuantizeActivation c = call;
  if (!c.tokens || !c.features || !c.sizes.groups) return;
  const DeviceGuard guard(device);
  const TokenTiles tiles = complete(c, kForwardBlocks, device);
  if (c.activation.kernels[0]) return launch_function(c, vectors, nullptr, tiles, 0, stream);
  dispatch_dtype_of_16_bits(c.type, [&](auto type) {
    using T = Element<decltype(type)::value>;
    dispatch_halves(c.activation, [&](auto halves) { launch_forward<T, halves.value>(c, tiles, stream); });
  });
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "quantising an activation of ", c.tokens, " rows of ", c.features,
                     " features, ", c.sizes.groups, " groups");
}

int64_t quantize_backward_workspace(int64_t tokens, int64_t features, int64_t groups, int64_t dvectors) {
  const int64_t shares = dscale_shares_bytes(tokens, features);
  return dvectors ? shares + kPartialsAlignment + column_partials_bytes(groups, tokens, dvectors * features) : shares;
}

void quantize_activation_backward(const QuantizeActivationBackward& call, const ColumnVectors& vectors,
                                  std::span<const DVector> dvectors, int device, cudaStream_t stream) {
  QuantizeActivationBackward c = call;
  if (!c.features || !c.sizes.groups) return;
  const DeviceGuard guard(device);
  if (!c.tokens) return sum_dvectors(c, dvectors, nullptr, stream);
  const TokenTiles tiles = complete(c, kBackwardBlocks, device);
  if (c.activation.kernels[0]) {
    float* const partials = dvectors.empty() ? nullptr : partials_behind_shares(c);
    launch_function(c, vectors, partials, tiles, sizeof(BackwardShared), stream);
    sum_dvectors(c, dvectors, partials, stream);
  } else {
    dispatch_dtype_of_16_bits(c.type, [&](auto type) {
      using T = Element<decltype(type)::value>;
      dispatch_halves(c.activation, [&](auto halves) { launch_backward<T, halves.value>(c, tiles, stream); });
    });
  }
  FUSIBLE_CUDA_CHECK(cudaGetLastError(), "quantising an activation's backward of ", c.tokens, " rows of ", c.features,
                     " features, ", c.sizes.groups, " groups");
  if (c.dscales)
    sum_dscale_partials(c.workspace, static_cast<int>(blocks_of(c.features, kScaleBlock)), c.tokens, c.sizes, c.dscales,
                        c.scales.type, stream);
}

}  // namespace fusible
