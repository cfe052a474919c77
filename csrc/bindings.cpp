// SPDX-License-Identifier: Apache-2.0
// fusible.ops._C: converts Python's integers and calls the C++ core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <sstream>
#include <vector>

#include "fusible/activation.h"
#include "fusible/device.h"
#include "fusible/fake_quantize_calls.h"
#include "fusible/fused_gemm.h"
#include "fusible/group_rows.h"
#include "fusible/grouped_gemm.h"
#include "fusible/launch_calls.h"
#include "fusible/launches.h"
#include "fusible/peer_calls.h"
#include "fusible/quantize_calls.h"
#include "fusible/ragged_gemm.h"
#include "fusible/routed_mlp.h"
#include "fusible/routing.h"
#include "kernels/scaled/scaled_params.h"
#include "keyword_call.h"
#include "tensor_lists.h"
#include "xla/handlers.h"

namespace py = pybind11;
using namespace py::literals;
using fusible::Address;

namespace {

std::string grouped_gemm_config(int layout, int operand, int output, int device, int64_t groups, int64_t tokens,
                                int64_t m, int64_t n, int64_t k, bool scale_bias, int64_t second_k) {
  const fusible::GemmProblem problem{static_cast<fusible::Layout>(layout),
                                     static_cast<fusible::DType>(operand),
                                     static_cast<fusible::DType>(output),
                                     scale_bias,
                                     groups,
                                     tokens,
                                     m,
                                     n,
                                     k,
                                     second_k};
  std::ostringstream text;
  text << fusible::choose_config(problem, fusible::device_properties(device).multiprocessors, -1,
                                 few_deep_tiles(problem));
  return text.str();
}

int64_t gemm_workspace_bytes(int layout, int output, int64_t groups, int64_t tokens, int64_t m, int64_t n,
                             int variant) {
  const fusible::GemmProblem problem{
      static_cast<fusible::Layout>(layout), {}, static_cast<fusible::DType>(output), false, groups, tokens, m, n, 0};
  const bool splits = variant < 0 ? few_deep_tiles(problem) : fusible::kTileVariants[variant].split_k;
  return splits ? fusible::split_k_workspace_bytes(groups) : fusible::workspace_bytes(groups);
}

fusible::Activation activation(int curve, bool gated, float alpha, float limit, float linear_offset, int64_t block) {
  return {static_cast<fusible::Curve>(curve), gated, alpha, limit, linear_offset, block};
}

// The configuration that linear_activation or its backward chooses, in words; n counts the columns of the product.
// `function`: the activation is one of a user, which has kernels of its own.
std::string linear_activation_config(bool backward, bool gated, int64_t block, int operand, int device, int64_t groups,
                                     int64_t tokens, int64_t n, int64_t k, bool scale_bias, int64_t second_k,
                                     bool function) {
  using fusible::Layout;
  const auto type = static_cast<fusible::DType>(operand);
  const fusible::GemmProblem problem{
      backward ? Layout::kNN : Layout::kNT, type, type, scale_bias, groups, tokens, 0, n, k, second_k};
  const int multiprocessors = fusible::device_properties(device).multiprocessors;
  std::ostringstream text;
  fusible::Activation wanted = activation(0, gated, 1, 0, 0, block);
  std::ranges::fill(wanted.kernels, function);
  if (backward) text << fusible::choose_backward_config(problem, multiprocessors);
  else text << fusible::choose_activation_config(problem, wanted, multiprocessors);
  text << ", the activation" << (backward ? "'s backward" : "") << " in the epilogue";
  return text.str();
}

// The numbers of those that are built for each layout, for results in fp32 or of 16 bits, without bias and factors.
std::vector<std::vector<int>> tile_variants(bool fp32_output) {
  std::vector<std::vector<int>> all(3);
  for (size_t layout = 0; layout < all.size(); ++layout)
    for (int i = 0; i < fusible::kTileVariantCount; ++i)
      if (is_built(static_cast<fusible::Layout>(layout), fusible::kTileVariants[i], fp32_output, false))
        all[layout].push_back(i);
  return all;
}

template <size_t kCount>
std::vector<int> list_of(const int (&numbers)[kCount]) {
  return {numbers, numbers + kCount};
}

// Whatever launches in the thread of an active capture is noted by it.
void def_capture(py::module_& module) {
  using fusible::Capture, fusible::Launches;
  // Local to this module: the emulation of the tests, which has the same types, may be in the same process.
  py::class_<Launches, std::shared_ptr<Launches>>(module, "Launches", py::module_local(),
                                                  "Captured launches, to be made again.")
      .def_property_readonly("for_any_rows", &Launches::for_any_rows)
      .def(
          "run",
          [](Launches& launches, const py::list& tensors, const py::list& memory, Address function, int64_t rows,
             int64_t stream) { launches.run(fusible::python::ReplayTensors(tensors, memory, function), rows, stream); },
          "tensors"_a, "memory"_a, "function"_a, "rows"_a, "stream"_a,
          "Makes all launches, in order, on tensors whose addresses a function of torch at this address tells, and "
          "adds the results to them. `memory` says for each result, and then for bytes, what allocates it and its "
          "sizes but the first.");
  py::class_<Capture>(module, "Capture", py::module_local(), "Notes the launches of this thread while it is entered.")
      .def(py::init<std::vector<std::array<Address, 2>>, int64_t, fusible::Numbers>(), "spans"_a, "rows"_a,
           "owned"_a = fusible::Numbers{})
      .def("__enter__", [](Capture& capture) { Capture::active() = &capture; })
      .def("__exit__", [](Capture&, const py::args&) { Capture::active() = nullptr; })
      .def_property_readonly("refusal", &Capture::refusal)
      .def("refuse", &Capture::refuse, "reason"_a, "Says that what happens now would not happen in a replay.")
      .def("allocated", &Capture::allocated, "address"_a, "bytes"_a, "per_row"_a,
           "Tells of memory; returns whether it is a workspace whose size the extension was asked for just before.")
      .def("result", &Capture::result, "address"_a, "bytes"_a, "first_size"_a,
           "Tells of what the run returns; returns the number of the tensor with this address or, behind those, of the "
           "result; -1 if none.")
      .def("launches", &Launches::of, "first"_a, "large"_a,
           "What is captured here, for its number of rows; for any number, if it fits another capture. Memory of "
           "`large` bytes is let go of between launches.");
  module.def("is_capturing", [] { return Capture::active() != nullptr; }, "Whether launches of this thread are noted.");
  module.def(
      "refuse",
      [](const std::string& reason) {
        if (Capture* capture = Capture::active()) capture->refuse(reason);
      },
      "reason"_a, "Tells the capture of this thread, if there is one, that this would not happen in a replay.");
}

// XLA's handlers by name, as jax registers them.
py::dict xla_handlers() {
  py::dict all;
  for (const auto& [name, function] : fusible::xla_ffi::handlers()) all[name] = py::capsule(function);
  return all;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using fusible::python::def;
  module.doc() =
      "CUDA kernels of fusible. Takes pointers and sizes as integers; importing it does not initialise CUDA.";
  module.def("cuda_version", &fusible::cuda_version, "Version of the CUDA runtime that is linked in, e.g. 13000.");
  module.def("raise_wrong_sizes", &fusible::raise_wrong_sizes, "device"_a,
             "Raises what kernels have reported of split sizes on the device since the last call, and forgets it.");
  module.def(
      "wrong_size_word", [](int device) { return reinterpret_cast<Address>(fusible::wrong_size_word(device)); },
      "device"_a, "The address of the word in which kernels on the device report split sizes.");
  def_capture(module);
  module.def("has_objects", &fusible::python::has_objects, "values"_a, "names"_a, "objects"_a,
             "Whether a dictionary has these objects under these names.");
  module.def("tensor_addresses", &fusible::python::tensor_addresses, "tensors"_a, "function"_a,
             "The addresses of tensors, told by a function of torch at this address, one after the other.");
  def<fusible::GroupedGemmLaunch>(
      module, "One grouped GEMM on `stream`. Codes: layout 0 NT, 1 NN, 2 TN; types 0 fp32, 1 fp16, 2 bf16.");
  module.def("grouped_gemm_config", &grouped_gemm_config, "layout"_a, "operand"_a, "output"_a, "device"_a, "groups"_a,
             "tokens"_a, "m"_a, "n"_a, "k"_a, "scale_bias"_a = false, "second_k"_a = 0,
             "The configuration that grouped_gemm chooses, in words.");
  def<fusible::ScaledGemmLaunch>(module, "One grouped GEMM (NT) of e4m3 rows and weights with scales of blocks.");
  def<fusible::RowScaledGemmLaunch>(module, "One grouped GEMM (NT) of e4m3 rows and weights whose rows have scales.");
  def<fusible::ScaledActivationLaunch>(
      module,
      "scaled_gemm whose epilogue is an activation times row scales, in e4m3; `out` 0: the product is not kept.");
  def<fusible::ScaledWgradLaunch>(module, "Weight gradients from e4m3 tokens in transposed blocks.");
  def<fusible::RaggedGemmLaunch>(module, "One grouped GEMM whose groups have shapes of their own.");
  module.def("ragged_workspace_bytes", &fusible::ragged_workspace_bytes, "groups"_a,
             "What ragged_gemm needs for itself.");
  module.def("gemm_workspace_bytes", &gemm_workspace_bytes, "layout"_a, "output"_a, "groups"_a, "tokens"_a, "m"_a,
             "n"_a, "variant"_a, "What a grouped GEMM needs for itself, with what makes it faster.");
  module.def("workspace_bytes", &fusible::workspace_bytes, "groups"_a,
             "What a launch needs for itself, aligned to 16 bytes.");
  def<fusible::ActivateLaunch>(module, "An activation times row scales. Curves: see fusible/activation.h.");
  def<fusible::ActivateBackwardLaunch>(module, "The backward of `activate`; 0 for what is not wanted.");
  def<fusible::LinearActivationLaunch>(module,
                                       "A grouped GEMM (NT or NN) whose epilogue is an activation times row scales; "
                                       "`preact` 0: the product is not kept.");
  def<fusible::LinearActivationBackwardLaunch>(
      module, "A grouped GEMM (NN or NT) whose epilogue is the backward of `activate`; 0 for what is not wanted.");
  module.def("linear_activation_config", &linear_activation_config, "backward"_a, "gated"_a, "block"_a, "operand"_a,
             "device"_a, "groups"_a, "tokens"_a, "n"_a, "k"_a, "scale_bias"_a = false, "second_k"_a = 0,
             "function"_a = false, "The configuration that linear_activation or its backward chooses, in words.");
  def<fusible::BackwardWorkspace>(module, "Bytes of workspace that linear_activation_backward needs.");
  module.attr("ACTIVATION_VARIANTS") = list_of(fusible::kActivationVariants);
  module.attr("DEEP_ACTIVATION_VARIANT") = fusible::kDeepActivationVariant;
  for (int i = 0; i < fusible::kTileVariantCount; ++i)
    if (fusible::kTileVariants[i].split_k) module.attr("SPLIT_K") = i;
  module.attr("BACKWARD_VARIANTS") = list_of(fusible::kBackwardVariants);
  module.attr("ACTIVATION_PARAMS_BYTES") = sizeof(fusible::ActivationParams);
  module.attr("PAIR_ACTIVATION_PARAMS_BYTES") = sizeof(fusible::WithSecondPair<fusible::ActivationParams>);
  module.attr("SCALED_ACTIVATION_PARAMS_BYTES") = sizeof(fusible::Params1D2D<fusible::QuantizedActivationParams>);
  module.attr("QUANTIZE_FUNCTION_BYTES") = sizeof(fusible::QuantizeFunction<fusible::QuantizeActivation>);
  module.attr("QUANTIZE_FUNCTION_BACKWARD_BYTES") =
      sizeof(fusible::QuantizeFunction<fusible::QuantizeActivationBackward>);
  module.attr("PAIR_VARIANTS") = list_of(fusible::kPairVariants);
  module.attr("TENSOR_MAP_ALIGNMENT") = alignof(CUtensorMap);
  def<fusible::PointwiseLaunch>(module,
                                "A kernel of a pointwise function over rows; 0 for what is not there or wanted.");
  def<fusible::ForeignLaunch>(module, "A kernel that another compiler has loaded; see fusible/foreign_kernel.h.");
  def<fusible::ZeroTailLaunch>(module, "Zeroes the rows past the last group.");
  def<fusible::ColumnSumsWorkspace>(module, "Bytes that column_sums needs.");
  def<fusible::ColumnSumsLaunch>(module, "Sums over the rows of each group, each row times its scale (0: one).");
  def<fusible::RowDotsLaunch>(module, "Every row times the vector of its group, in fp32.");
  def<fusible::LowRankWorkspace>(module, "Bytes that low_rank_pass needs.");
  def<fusible::LowRankPassLaunch>(module,
                                  "Rows gathered, times a factor of low rank, and a factor's gradient, in one pass; "
                                  "0 for what is not wanted.");
  def<fusible::ChoiceWorkspace>(module, "Bytes that choose needs.");
  def<fusible::ChooseLaunch>(module, "The experts of tokens and their weights, by logits; 0 for what is not wanted.");
  def<fusible::ChooseBackwardLaunch>(module, "The gradient of the logits of a choice of experts.");
  def<fusible::RouteWorkspace>(module, "Bytes that route needs.");
  def<fusible::RouteLaunch>(
      module, "Finds the row of each slot of each token: a stable sort by expert. 0 for what is not wanted.");
  def<fusible::PermuteLaunch>(module, "Copies each token's row to its rows of the experts.");
  def<fusible::UnpermuteLaunch>(module, "Each token's row is the sum of its rows of the experts.");
  def<fusible::GatherSlotsLaunch>(module, "The value of the row of each slot, 0 for the slots of no expert.");
  def<fusible::PublishLaunch>(
      module, "Tells all ranks of a lane that what was written before is there, and waits until all have told so.");
  def<fusible::DivideRowsLaunch>(module, "Of the rows of all experts, those that each rank keeps.");
  def<fusible::StageRowsLaunch>(
      module, "Copies the rows of this rank to where peers read them, or to the slots of their tokens.");
  def<fusible::PullLaunch>(module, "Copies the tokens of all ranks to the rows of this rank.");
  def<fusible::PullBlocksLaunch>(module, "The same, telling of blocks of rows to a kernel that waits for them.");
  def<fusible::PullSumLaunch>(module, "Each token of this rank is the sum of its rows, wherever they are.");
  def<fusible::PushSumsLaunch>(module, "Sums of this rank's rows by token, stored at the ranks of the tokens.");
  def<fusible::SumPartsLaunch>(module, "Each token of this rank is the sum of what ranks pushed for it.");
  def<fusible::NumbersToRowsLaunch>(module, "The number of each row of this rank, from those of slots.");
  def<fusible::PullNumbersLaunch>(module, "The number of each slot of this rank, from those of rows.");
  def<fusible::GemmToSlotsLaunch>(module, "A grouped GEMM whose rows go to the slots of their tokens' ranks.");
  module.attr("MAX_RANKS") = fusible::kMaxRanks;
  module.attr("SIGNAL_BYTES") = fusible::kSignalBytes;
  module.attr("LANE_STATE_BYTES") = sizeof(fusible::LaneState);
  def<fusible::RoutedMlpWorkspace>(module, "Bytes of workspace that routed_mlp needs.");
  def<fusible::RoutedMlpLaunch>(
      module, "The routed experts of a layer without gradients: routing, both linears, the weighted sum.");
  def<fusible::QuantizeRowsLaunch>(
      module,
      "Rows of tokens in e4m3, as they lie and transposed in blocks of a group's tokens; 0 for a copy not wanted.");
  def<fusible::QuantizeWorkspace>(module, "Bytes of `amax` of quantize_rows and quantize_weight.");
  def<fusible::QuantizeWeightLaunch>(module, "Weights in e4m3, as they lie and transposed; 0 for a copy not wanted.");
  def<fusible::TransposeBytesLaunch>(module, "The transposes of matrices of bytes [groups, rows, columns].");
  def<fusible::DecodeWeightLaunch>(module, "The values of a weight that is stored in 8 or 4 bits, in 16.");
  def<fusible::QuantizeActivationLaunch>(module, "An activation times row scales, in e4m3; 0 for a copy not wanted.");
  def<fusible::QuantizeBackwardWorkspace>(module, "Bytes that quantize_activation_backward needs for `dscales`.");
  def<fusible::QuantizeActivationBackwardLaunch>(
      module, "The gradient of a pre-activation and the activation again, in e4m3; 0 for what is not wanted.");
  def<fusible::FakeQuantizeRowsLaunch>(
      module,
      "The values in bf16 of the copies of rows of tokens. Formats: 0 MXFP8, 1 NVFP4; 0 for what is not wanted.");
  def<fusible::FakeQuantizeWeightLaunch>(module, "The same of the copies of a weight.");
  def<fusible::PackedGemmLaunch>(
      module,
      "A grouped product (NT) of bf16 rows and packed weights, for few rows. Formats: 0 MXFP8, 1 NVFP4, 2 MXFP4.");
  def<fusible::StoredGemmLaunch>(
      module, "A grouped product (NT or NN) of bf16 rows and MXFP4 weights as they are stored, for many rows.");
  module.def("xla_handlers", &xla_handlers, "Handlers for XLA's foreign function interface, by name.");
  module.attr("XLA_FFI_API") =
      py::make_tuple(fusible::xla_ffi::api_version().first, fusible::xla_ffi::api_version().second);
  module.attr("TILE_VARIANTS") = tile_variants(false);
  module.attr("FP32_OUTPUT_TILE_VARIANTS") = tile_variants(true);
}
