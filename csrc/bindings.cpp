// fusible.ops._C: converts Python's integers and calls the C++ core, nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <sstream>
#include <string_view>
#include <vector>

#include "fusible/activation.h"
#include "fusible/device.h"
#include "fusible/fused_gemm.h"
#include "fusible/group_rows.h"
#include "fusible/grouped_gemm.h"
#include "fusible/launches.h"
#include "fusible/ragged_gemm.h"
#include "fusible/routed_mlp.h"
#include "fusible/routing.h"
#include "fusible/zeroing.h"

namespace py = pybind11;
using namespace py::literals;
using fusible::Address, fusible::Addresses;
using Stream = int64_t;  // the address of a cudaStream_t; no memory of a launch

// What launches.h wants of calls.
namespace fusible {
void launch(const GroupedGemm& call, int device, cudaStream_t stream) { grouped_gemm(call, device, stream); }
void launch(const LinearActivation& call, int device, cudaStream_t stream) { linear_activation(call, device, stream); }
void launch(const LinearActivationBackward& call, int device, cudaStream_t stream) {
  linear_activation_backward(call, device, stream);
}
void zero_before(LinearActivation& call, Zeroing& zeroing) { zero_before(call.gemm, zeroing); }
void zero_before(LinearActivationBackward& call, Zeroing& zeroing) { zero_before(call.gemm, zeroing); }
}  // namespace fusible

namespace {

py::dict device_properties(int device) {
  const fusible::DeviceProperties& properties = fusible::device_properties(device);
  return py::dict("name"_a = properties.name, "capability"_a = py::make_tuple(properties.major, properties.minor),
                  "multiprocessors"_a = properties.multiprocessors,
                  "shared_memory_per_block"_a = properties.shared_memory_per_block, "l2_bytes"_a = properties.l2_bytes);
}

template <class T>
const T* pointer(Address address) {
  return reinterpret_cast<const T*>(address);
}

fusible::OnStream<fusible::GroupedGemm> grouped_gemm(
    int layout, int operand, int output, int device, Stream stream, int64_t groups, int64_t tokens, int64_t m,
    int64_t n, int64_t k, Address a, int64_t a_pitch, Address b, int64_t b_pitch, int64_t b_group, Address out,
    int64_t out_pitch, int64_t out_group, Address sizes, bool int64_sizes, bool accumulate, Address bias, int bias_type,
    int64_t bias_pitch, Address row_scale, Address bias_scale, Address alphas, float alpha, Address betas, float beta,
    Address workspace, int variant, const Addresses& b_addresses, const Addresses& out_addresses,
    const Addresses& bias_addresses, bool zero_tail) {
  using fusible::DType;
  const DType type = static_cast<DType>(operand);
  fusible::GroupedGemm call{
      .problem = {static_cast<fusible::Layout>(layout), type, static_cast<DType>(output),
                  bias || !bias_addresses.empty() || row_scale || bias_scale || alphas || alpha != 1, groups, tokens, m,
                  n, k},
      .a = {pointer<void>(a), type, a_pitch, 0},
      .b = {pointer<void>(b), type, b_pitch, b_group, b_addresses},
      .out = {pointer<void>(out), static_cast<DType>(output), out_pitch, out_group, out_addresses},
      .sizes = {pointer<void>(sizes), static_cast<int>(groups), int64_sizes},
      .epilogue = {{pointer<void>(bias), static_cast<DType>(bias_type), bias_pitch, 0, bias_addresses},
                   pointer<float>(row_scale),
                   pointer<float>(bias_scale),
                   pointer<float>(alphas),
                   alpha},
      .accumulate = accumulate,
      .betas = pointer<float>(betas),
      .beta = beta,
      .workspace = reinterpret_cast<void*>(workspace),
      .variant = variant,
      .zero_tail = zero_tail,
  };
  return {call, device, reinterpret_cast<cudaStream_t>(stream)};
}

std::string grouped_gemm_config(int layout, int operand, int output, int device, int64_t groups, int64_t tokens,
                                int64_t m, int64_t n, int64_t k, bool scale_bias) {
  const fusible::GemmProblem problem{static_cast<fusible::Layout>(layout),
                                     static_cast<fusible::DType>(operand),
                                     static_cast<fusible::DType>(output),
                                     scale_bias,
                                     groups,
                                     tokens,
                                     m,
                                     n,
                                     k};
  std::ostringstream text;
  text << fusible::choose_config(problem, fusible::device_properties(device).multiprocessors);
  return text.str();
}

// Data, elements, then for rows and columns: dims on the device (0: the number for all groups), whether they are int64,
// the number.
using Packed = std::array<int64_t, 8>;
fusible::PackedMatrices packed(const Packed& m, int64_t groups) {
  const auto dims = [&](size_t i) {
    return fusible::Dims{{pointer<void>(m[i]), static_cast<int>(groups), m[i + 1] != 0}, m[i + 2]};
  };
  return {pointer<void>(m[0]), m[1], dims(2), dims(5)};
}

void ragged_gemm(int layout, int operand, int output, int device, Stream stream, int64_t groups, const Packed& a,
                 const Packed& b, Address out, int64_t out_elements, bool zero_tail, bool accumulate, Address bias,
                 int bias_type, int64_t bias_pitch, Address alphas, float alpha, Address betas, float beta,
                 Address workspace) {
  using fusible::DType;
  fusible::RaggedGemm call{.layout = static_cast<fusible::Layout>(layout),
                           .operand = static_cast<DType>(operand),
                           .output = static_cast<DType>(output),
                           .groups = groups,
                           .a = packed(a, groups),
                           .b = packed(b, groups),
                           .out = reinterpret_cast<void*>(out),
                           .out_elements = out_elements,
                           .epilogue = {{pointer<void>(bias), static_cast<DType>(bias_type), bias_pitch, 0},
                                        nullptr,
                                        nullptr,
                                        pointer<float>(alphas),
                                        alpha},
                           .accumulate = accumulate,
                           .zero_tail = zero_tail,
                           .betas = pointer<float>(betas),
                           .beta = beta,
                           .workspace = reinterpret_cast<void*>(workspace)};
  fusible::ragged_gemm(call, device, reinterpret_cast<cudaStream_t>(stream));
}

fusible::Activation activation(int curve, bool gated, float alpha, float limit, float linear_offset, int64_t block) {
  return {static_cast<fusible::Curve>(curve), gated, alpha, limit, linear_offset, block};
}

void activate(int curve, bool gated, float alpha, float limit, float linear_offset, int64_t block, int device,
              Stream stream, int type, int64_t rows, int64_t columns, Address pre, Address scales, int scales_type,
              Address hidden) {
  fusible::activate({activation(curve, gated, alpha, limit, linear_offset, block),
                     static_cast<fusible::DType>(type),
                     rows,
                     columns,
                     pointer<void>(pre),
                     {pointer<void>(scales), static_cast<fusible::DType>(scales_type)},
                     reinterpret_cast<void*>(hidden)},
                    device, reinterpret_cast<cudaStream_t>(stream));
}

void activate_backward(int curve, bool gated, float alpha, float limit, float linear_offset, int64_t block, int device,
                       Stream stream, int type, int64_t rows, int64_t columns, Address dhidden, Address pre,
                       Address scales, int scales_type, Address dpre, Address dscales, Address hidden) {
  fusible::activate_backward({activation(curve, gated, alpha, limit, linear_offset, block),
                              static_cast<fusible::DType>(type),
                              rows,
                              columns,
                              pointer<void>(dhidden),
                              pointer<void>(pre),
                              {pointer<void>(scales), static_cast<fusible::DType>(scales_type)},
                              reinterpret_cast<void*>(dpre),
                              reinterpret_cast<void*>(dscales),
                              reinterpret_cast<void*>(hidden)},
                             device, reinterpret_cast<cudaStream_t>(stream));
}

fusible::GroupedGemm gemm_of(int layout, int operand, int64_t groups, int64_t tokens, int64_t n, int64_t k, Address a,
                             int64_t a_pitch, Address b, int64_t b_pitch, int64_t b_group, const Addresses& b_addresses,
                             Address sizes, bool int64_sizes, Address workspace, int variant) {
  const auto type = static_cast<fusible::DType>(operand);
  fusible::GroupedGemm call{};
  call.problem = {static_cast<fusible::Layout>(layout), type, type, false, groups, tokens, 0, n, k};
  call.a = {pointer<void>(a), type, a_pitch, 0};
  call.b = {pointer<void>(b), type, b_pitch, b_group, b_addresses};
  call.sizes = {pointer<void>(sizes), static_cast<int>(groups), int64_sizes};
  call.workspace = reinterpret_cast<void*>(workspace);
  call.variant = variant;
  return call;
}

fusible::OnStream<fusible::LinearActivation> linear_activation(
    int curve, bool gated, float alpha, float limit, float linear_offset, int64_t block, int device, Stream stream,
    int layout, int operand, int64_t groups, int64_t tokens, int64_t n, int64_t k, Address a, int64_t a_pitch,
    Address b, int64_t b_pitch, int64_t b_group, const Addresses& b_addresses, Address sizes, bool int64_sizes,
    Address bias, int bias_type, int64_t bias_pitch, const Addresses& bias_addresses, Address bias_scale,
    Address scales, int scales_type, Address pre, Address hidden, Address workspace, int variant) {
  fusible::GroupedGemm gemm = gemm_of(layout, operand, groups, tokens, n, k, a, a_pitch, b, b_pitch, b_group,
                                      b_addresses, sizes, int64_sizes, workspace, variant);
  gemm.problem.scale_bias = bias || !bias_addresses.empty();
  gemm.epilogue = {{pointer<void>(bias), static_cast<fusible::DType>(bias_type), bias_pitch, 0, bias_addresses},
                   nullptr,
                   pointer<float>(bias_scale),
                   nullptr,
                   1.f};
  gemm.out = {pointer<void>(pre), gemm.problem.operand, n, 0};
  return {{gemm,
           activation(curve, gated, alpha, limit, linear_offset, block),
           {pointer<void>(scales), static_cast<fusible::DType>(scales_type)},
           reinterpret_cast<void*>(hidden)},
          device,
          reinterpret_cast<cudaStream_t>(stream)};
}

fusible::OnStream<fusible::LinearActivationBackward> linear_activation_backward(
    int curve, bool gated, float alpha, float limit, float linear_offset, int64_t block, int device, Stream stream,
    int layout, int operand, int64_t groups, int64_t tokens, int64_t n, int64_t k, Address a, int64_t a_pitch,
    Address b, int64_t b_pitch, int64_t b_group, const Addresses& b_addresses, Address sizes, bool int64_sizes,
    Address scales, int scales_type, Address pre, Address dpre, Address dscales, Address hidden, Address dbias,
    int dbias_type, Address workspace, int variant) {
  const fusible::GroupedGemm gemm = gemm_of(layout, operand, groups, tokens, n, k, a, a_pitch, b, b_pitch, b_group,
                                            b_addresses, sizes, int64_sizes, workspace, variant);
  return {{gemm,
           activation(curve, gated, alpha, limit, linear_offset, block),
           {pointer<void>(scales), static_cast<fusible::DType>(scales_type)},
           pointer<void>(pre),
           reinterpret_cast<void*>(dpre),
           reinterpret_cast<void*>(dscales),
           reinterpret_cast<void*>(hidden),
           reinterpret_cast<void*>(dbias),
           static_cast<fusible::DType>(dbias_type)},
          device,
          reinterpret_cast<cudaStream_t>(stream)};
}

// The configuration that linear_activation or its backward chooses, in words; n counts the columns of the product.
std::string linear_activation_config(bool backward, bool gated, int64_t block, int operand, int device, int64_t groups,
                                     int64_t tokens, int64_t n, int64_t k, bool scale_bias) {
  using fusible::Layout;
  const auto type = static_cast<fusible::DType>(operand);
  const fusible::GemmProblem problem{
      backward ? Layout::kNN : Layout::kNT, type, type, scale_bias, groups, tokens, 0, n, k};
  const int multiprocessors = fusible::device_properties(device).multiprocessors;
  std::ostringstream text;
  if (backward) text << fusible::choose_backward_config(problem, multiprocessors);
  else text << fusible::choose_activation_config(problem, activation(0, gated, 1, 0, 0, block), multiprocessors);
  text << ", the activation" << (backward ? "'s backward" : "") << " in the epilogue";
  return text.str();
}

void zero_tail(int device, Stream stream, Address data, int64_t tokens, int64_t row_bytes, int64_t pitch_bytes,
               Address sizes, int groups, bool int64_sizes) {
  fusible::zero({{},
                 {{{reinterpret_cast<void*>(data), tokens, row_bytes, pitch_bytes},
                   {pointer<void>(sizes), groups, int64_sizes}}}},
                device, reinterpret_cast<cudaStream_t>(stream));
}

fusible::DenseRows dense_rows(Address data, int type, int64_t tokens, int64_t columns, int64_t pitch) {
  return {pointer<void>(data), static_cast<fusible::DType>(type), tokens, columns, pitch};
}

void column_sums(int device, Stream stream, Address rows, int type, int64_t tokens, int64_t columns, int64_t pitch,
                 Address sizes, int groups, bool int64_sizes, Address scale, Address out, int out_type,
                 Address workspace) {
  fusible::column_sums({dense_rows(rows, type, tokens, columns, pitch),
                        pointer<float>(scale),
                        {pointer<void>(sizes), groups, int64_sizes},
                        reinterpret_cast<void*>(out),
                        static_cast<fusible::DType>(out_type),
                        reinterpret_cast<float*>(workspace)},
                       device, reinterpret_cast<cudaStream_t>(stream));
}

void row_dots(int device, Stream stream, Address rows, int type, int64_t tokens, int64_t columns, int64_t pitch,
              Address sizes, int groups, bool int64_sizes, Address vectors, int vectors_type, Address out) {
  fusible::row_dots({dense_rows(rows, type, tokens, columns, pitch),
                     pointer<void>(vectors),
                     static_cast<fusible::DType>(vectors_type),
                     {pointer<void>(sizes), groups, int64_sizes},
                     reinterpret_cast<float*>(out)},
                    device, reinterpret_cast<cudaStream_t>(stream));
}

// A function that launches, as itself and as a method of Launches that keeps the launch. The method calls the function,
// which then finds where to keep what it would have launched: so its dozens of arguments are converted by code that is
// compiled once.
class LaunchDefinitions {
 public:
  explicit LaunchDefinitions(py::module_& module)
      : module_(module), kept_(module, "Launches", "Launches that are kept, to be made again with other addresses.") {
    kept_.def(py::init<>())
        .def("run", &fusible::Launches::run, "addresses"_a, "rows"_a, "stream"_a, "Makes all launches, in order.");
  }
  template <class... Args, class... Extra>
  void def(const char* name, void (*function)(Args...), const Extra&... extra) {
    module_.def(
        name,
        [function](const std::decay_t<Args>&... args) {
          if (keeping_) keeping_->launches.add(function, keeping_->patches, args...);
          else function(args...);
        },
        extra...);
    keep(name, function, extra...);
  }
  // A call, which is launched at once, or together with others.
  template <class Call, class... Args, class... Extra>
  void def(const char* name, fusible::OnStream<Call> (*make)(Args...), const Extra&... extra) {
    module_.def(
        name,
        [make](const std::decay_t<Args>&... args) {
          if (keeping_) return keeping_->launches.add(make, keeping_->patches, args...);
          const auto made = make(args...);
          launch(made.call, made.device, made.stream);
        },
        extra...);
    keep(name, make, extra...);
  }
  // Of each such function the positions of its arguments that are addresses.
  const py::dict& positions() const { return positions_; }

 private:
  struct Keeping {
    fusible::Launches& launches;
    const std::vector<fusible::Patch>& patches;
  };
  static inline thread_local const Keeping* keeping_ =
      nullptr;  // while a method of Launches runs; other threads launch what they call meanwhile

  static bool is_stream(const py::arg& argument) { return std::string_view(argument.name) == "stream"; }
  static bool is_stream(const char*) { return false; }

  template <class Function, class... Extra>
  void keep(const char* name, Function function, const Extra&... extra) {
    const bool streams[] = {is_stream(extra)...};
    keep(name, std::find(std::begin(streams), std::end(streams), true) - std::begin(streams));
    positions_[name] = py::cast(fusible::address_positions(function));
  }
  void keep(const char* name, int64_t stream) {
    const py::object function = module_.attr(name);
    kept_.def(name, [=](fusible::Launches& launches, const std::vector<std::array<int64_t, 5>>& patches,
                        const py::args& args) {
      std::vector<fusible::Patch> where;
      for (const auto& [position, element, source, offset, factor] : patches)
        where.push_back({position, element, source, offset, factor});
      where.push_back({stream, 0, fusible::Patch::kStream, 0, 0});
      const Keeping keeping{launches, where};
      keeping_ = &keeping;
      const auto forget = [](const void*) { keeping_ = nullptr; };  // also where the arguments are of other types
      const std::unique_ptr<const void, decltype(forget)> until_the_end(&keeping, forget);
      function(*args);
    });
  }

  py::module_& module_;
  py::class_<fusible::Launches> kept_;
  py::dict positions_;
};

template <class T>
T* writable(Address address) {
  return reinterpret_cast<T*>(address);
}

void route(int device, Stream stream, Address ids, bool int64_ids, int64_t slots, int groups, Address weights,
           int weights_type, Address sizes, Address order, Address place, Address scales, Address counts) {
  fusible::route({pointer<void>(ids),
                  int64_ids,
                  slots,
                  groups,
                  {pointer<void>(weights), static_cast<fusible::DType>(weights_type)},
                  writable<int32_t>(sizes),
                  writable<int32_t>(order),
                  writable<int32_t>(place),
                  writable<float>(scales),
                  writable<int32_t>(counts)},
                 device, reinterpret_cast<cudaStream_t>(stream));
}

fusible::RoutedRows routed_rows(int type, int64_t tokens, int64_t columns, int slots, Address place, Address all,
                                Address from, int64_t from_pitch, Address to, int64_t to_pitch) {
  return {static_cast<fusible::DType>(type),
          tokens,
          columns,
          slots,
          pointer<int32_t>(place),
          pointer<int32_t>(all),
          pointer<void>(from),
          from_pitch,
          writable<void>(to),
          to_pitch};
}

void spread_rows(int device, Stream stream, int type, int64_t tokens, int64_t columns, int slots, Address place,
                 Address all, Address from, int64_t from_pitch, Address to, int64_t to_pitch, bool fill) {
  fusible::spread_rows(routed_rows(type, tokens, columns, slots, place, all, from, from_pitch, to, to_pitch), fill,
                       device, reinterpret_cast<cudaStream_t>(stream));
}

void sum_rows(int device, Stream stream, int type, int64_t tokens, int64_t columns, int slots, Address place,
              Address all, Address from, int64_t from_pitch, Address to, int64_t to_pitch) {
  fusible::sum_rows(routed_rows(type, tokens, columns, slots, place, all, from, from_pitch, to, to_pitch), device,
                    reinterpret_cast<cudaStream_t>(stream));
}

void numbers_of_slots(int device, Stream stream, Address rows, Address place, Address all, int64_t slots, Address to,
                      int type) {
  fusible::numbers_of_slots(pointer<float>(rows), pointer<int32_t>(place), pointer<int32_t>(all), slots,
                            writable<void>(to), static_cast<fusible::DType>(type), device,
                            reinterpret_cast<cudaStream_t>(stream));
}

void routed_mlp(int curve, bool gated, float alpha, float limit, float linear_offset, int64_t block, int type,
                int groups, int64_t features, int64_t columns, bool transposed, bool separate, Address up,
                int64_t up_pitch, int64_t up_group, Address down, int64_t down_pitch, int64_t down_group,
                Address up_bias, int64_t up_bias_pitch, Address down_bias, int64_t down_bias_pitch, int bias_type,
                int device, Stream stream, int64_t tokens, int slots, Address x, int64_t pitch, Address ids,
                bool int64_ids, Address weights, int weights_type, Address out, Address workspace) {
  const auto operand = static_cast<fusible::DType>(type), of_bias = static_cast<fusible::DType>(bias_type);
  const fusible::RoutedMlp mlp{operand,
                               groups,
                               features,
                               columns,
                               activation(curve, gated, alpha, limit, linear_offset, block),
                               transposed,
                               separate,
                               {pointer<void>(up), operand, up_pitch, up_group},
                               {pointer<void>(down), operand, down_pitch, down_group},
                               {pointer<void>(up_bias), of_bias, up_bias_pitch, 0},
                               {pointer<void>(down_bias), of_bias, down_bias_pitch, 0}};
  fusible::routed_mlp(mlp,
                      {tokens,
                       slots,
                       pointer<void>(x),
                       pitch,
                       pointer<void>(ids),
                       int64_ids,
                       {pointer<void>(weights), static_cast<fusible::DType>(weights_type)},
                       writable<void>(out),
                       writable<void>(workspace)},
                      device, reinterpret_cast<cudaStream_t>(stream));
}

int64_t routed_workspace_bytes(bool gated, int type, int groups, int64_t features, int64_t columns, bool separate,
                               int64_t slots) {
  fusible::RoutedMlp mlp{};
  mlp.type = static_cast<fusible::DType>(type), mlp.groups = groups, mlp.features = features, mlp.columns = columns;
  mlp.activation.gated = gated, mlp.separate = separate;
  return fusible::routed_workspace_bytes(mlp, slots);
}

// The numbers of those that are built for each layout, for results in fp32 or of 16 bits.
std::vector<std::vector<int>> tile_variants(bool fp32_output) {
  std::vector<std::vector<int>> all(3);
  for (size_t layout = 0; layout < all.size(); ++layout)
    for (int i = 0; i < fusible::kTileVariantCount; ++i)
      if (is_built(static_cast<fusible::Layout>(layout), fusible::kTileVariants[i], fp32_output))
        all[layout].push_back(i);
  return all;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  LaunchDefinitions launches(module);
  module.doc() =
      "CUDA kernels of fusible. Takes pointers and sizes as integers; importing it does not initialise CUDA.";
  module.def("cuda_version", &fusible::cuda_version, "Version of the CUDA runtime that is linked in, e.g. 13000.");
  module.def("device_properties", &device_properties, "device"_a);
  launches.def("grouped_gemm", &grouped_gemm, "layout"_a, "operand"_a, "output"_a, "device"_a, "stream"_a, "groups"_a,
               "tokens"_a, "m"_a, "n"_a, "k"_a, "a"_a, "a_pitch"_a, "b"_a, "b_pitch"_a, "b_group"_a, "out"_a,
               "out_pitch"_a, "out_group"_a, "sizes"_a, "int64_sizes"_a, "accumulate"_a, "bias"_a = 0,
               "bias_type"_a = 0, "bias_pitch"_a = 0, "row_scale"_a = 0, "bias_scale"_a = 0, "alphas"_a = 0,
               "alpha"_a = 1, "betas"_a = 0, "beta"_a = 1, "workspace"_a = 0, "variant"_a = -1,
               "b_addresses"_a = Addresses(), "out_addresses"_a = Addresses(), "bias_addresses"_a = Addresses(),
               "zero_tail"_a = false,
               "Launches one grouped GEMM on `stream`. Codes: layout 0 NT, 1 NN, 2 TN; types 0 fp32, 1 fp16, 2 bf16.");
  module.def("grouped_gemm_config", &grouped_gemm_config, "layout"_a, "operand"_a, "output"_a, "device"_a, "groups"_a,
             "tokens"_a, "m"_a, "n"_a, "k"_a, "scale_bias"_a = false,
             "The configuration that grouped_gemm chooses, in words.");
  module.def(
      "ragged_gemm", &ragged_gemm, "layout"_a, "operand"_a, "output"_a, "device"_a, "stream"_a, "groups"_a, "a"_a,
      "b"_a, "out"_a, "out_elements"_a, "zero_tail"_a, "accumulate"_a, "bias"_a, "bias_type"_a, "bias_pitch"_a,
      "alphas"_a, "alpha"_a, "betas"_a, "beta"_a, "workspace"_a,
      "One grouped GEMM whose groups have shapes of their own; a and b are (data, elements, rows, int64, rows of "
      "all, columns, int64, columns of all).");
  module.def("ragged_workspace_bytes", &fusible::ragged_workspace_bytes, "groups"_a,
             "What ragged_gemm needs for itself.");
  module.def("workspace_bytes", &fusible::workspace_bytes, "groups"_a,
             "What a launch needs for itself, aligned to 16 bytes.");
  launches.def("activate", &activate, "curve"_a, "gated"_a, "alpha"_a, "limit"_a, "linear_offset"_a, "block"_a,
               "device"_a, "stream"_a, "type"_a, "rows"_a, "columns"_a, "pre"_a, "scales"_a, "scales_type"_a,
               "hidden"_a, "An activation times row scales. Curves: see fusible/activation.h.");
  launches.def("activate_backward", &activate_backward, "curve"_a, "gated"_a, "alpha"_a, "limit"_a, "linear_offset"_a,
               "block"_a, "device"_a, "stream"_a, "type"_a, "rows"_a, "columns"_a, "dhidden"_a, "pre"_a, "scales"_a,
               "scales_type"_a, "dpre"_a, "dscales"_a, "hidden"_a,
               "The backward of `activate`; 0 for what is not wanted.");
  launches.def(
      "linear_activation", &linear_activation, "curve"_a, "gated"_a, "alpha"_a, "limit"_a, "linear_offset"_a, "block"_a,
      "device"_a, "stream"_a, "layout"_a, "operand"_a, "groups"_a, "tokens"_a, "n"_a, "k"_a, "a"_a, "a_pitch"_a, "b"_a,
      "b_pitch"_a, "b_group"_a, "b_addresses"_a, "sizes"_a, "int64_sizes"_a, "bias"_a, "bias_type"_a, "bias_pitch"_a,
      "bias_addresses"_a, "bias_scale"_a, "scales"_a, "scales_type"_a, "pre"_a, "hidden"_a, "workspace"_a,
      "variant"_a = -1,
      "A grouped GEMM (NT or NN) whose epilogue is an activation times row scales; `pre` 0: the product is not kept.");
  launches.def("linear_activation_backward", &linear_activation_backward, "curve"_a, "gated"_a, "alpha"_a, "limit"_a,
               "linear_offset"_a, "block"_a, "device"_a, "stream"_a, "layout"_a, "operand"_a, "groups"_a, "tokens"_a,
               "n"_a, "k"_a, "a"_a, "a_pitch"_a, "b"_a, "b_pitch"_a, "b_group"_a, "b_addresses"_a, "sizes"_a,
               "int64_sizes"_a, "scales"_a, "scales_type"_a, "pre"_a, "dpre"_a, "dscales"_a, "hidden"_a, "dbias"_a,
               "dbias_type"_a, "workspace"_a, "variant"_a = -1,
               "A grouped GEMM (NN or NT) whose epilogue is the backward of `activate`; 0 for what is not wanted.");
  module.def("linear_activation_config", &linear_activation_config, "backward"_a, "gated"_a, "block"_a, "operand"_a,
             "device"_a, "groups"_a, "tokens"_a, "n"_a, "k"_a, "scale_bias"_a = false,
             "The configuration that linear_activation or its backward chooses, in words.");
  module.def("backward_workspace_bytes", &fusible::backward_workspace_bytes, "groups"_a, "tokens"_a, "columns"_a,
             "dscales"_a, "bias_columns"_a, "Bytes of workspace that linear_activation_backward needs.");
  module.attr("ACTIVATION_VARIANTS") =
      std::vector<int>(std::begin(fusible::kActivationVariants), std::end(fusible::kActivationVariants));
  module.attr("BACKWARD_VARIANTS") =
      std::vector<int>(std::begin(fusible::kBackwardVariants), std::end(fusible::kBackwardVariants));
  launches.def("zero_tail", &zero_tail, "device"_a, "stream"_a, "data"_a, "tokens"_a, "row_bytes"_a, "pitch_bytes"_a,
               "sizes"_a, "groups"_a, "int64_sizes"_a, "Zeroes the rows past the last group.");
  module.def("column_sums_workspace", &fusible::column_sums_workspace, "tokens"_a, "columns"_a, "groups"_a,
             "Bytes that column_sums needs.");
  launches.def("column_sums", &column_sums, "device"_a, "stream"_a, "rows"_a, "type"_a, "tokens"_a, "columns"_a,
               "pitch"_a, "sizes"_a, "groups"_a, "int64_sizes"_a, "scale"_a, "out"_a, "out_type"_a, "workspace"_a,
               "Sums over the rows of each group, each row times its scale (0: one).");
  launches.def("row_dots", &row_dots, "device"_a, "stream"_a, "rows"_a, "type"_a, "tokens"_a, "columns"_a, "pitch"_a,
               "sizes"_a, "groups"_a, "int64_sizes"_a, "vectors"_a, "vectors_type"_a, "out"_a,
               "Every row times the vector of its group, in fp32.");
  module.def("route_workspace_bytes", &fusible::route_workspace_bytes, "slots"_a, "groups"_a);
  launches.def("route", &route, "device"_a, "stream"_a, "ids"_a, "int64_ids"_a, "slots"_a, "groups"_a, "weights"_a,
               "weights_type"_a, "sizes"_a, "order"_a, "place"_a, "scales"_a, "counts"_a,
               "Finds the row of each slot of each token: a stable sort by expert. 0 for what is not wanted.");
  launches.def("spread_rows", &spread_rows, "device"_a, "stream"_a, "type"_a, "tokens"_a, "columns"_a, "slots"_a,
               "place"_a, "all"_a, "from_"_a, "from_pitch"_a, "to"_a, "to_pitch"_a, "fill"_a,
               "Copies each token's row to its rows of the experts.");
  launches.def("sum_rows", &sum_rows, "device"_a, "stream"_a, "type"_a, "tokens"_a, "columns"_a, "slots"_a, "place"_a,
               "all"_a, "from_"_a, "from_pitch"_a, "to"_a, "to_pitch"_a,
               "Each token's row is the sum of its rows of the experts.");
  launches.def("numbers_of_slots", &numbers_of_slots, "device"_a, "stream"_a, "rows"_a, "place"_a, "all"_a, "slots"_a,
               "to"_a, "type"_a, "Of each slot the number of its row, 0 for those of no expert.");
  launches.def("routed_mlp", &routed_mlp, "curve"_a, "gated"_a, "alpha"_a, "limit"_a, "linear_offset"_a, "block"_a,
               "type"_a, "groups"_a, "features"_a, "columns"_a, "transposed"_a, "separate"_a, "up"_a, "up_pitch"_a,
               "up_group"_a, "down"_a, "down_pitch"_a, "down_group"_a, "up_bias"_a, "up_bias_pitch"_a, "down_bias"_a,
               "down_bias_pitch"_a, "bias_type"_a, "device"_a, "stream"_a, "tokens"_a, "slots"_a, "x"_a, "pitch"_a,
               "ids"_a, "int64_ids"_a, "weights"_a, "weights_type"_a, "out"_a, "workspace"_a,
               "The routed experts of a layer without gradients: routing, both linears, the weighted sum.");
  module.def("routed_workspace_bytes", &routed_workspace_bytes, "gated"_a, "type"_a, "groups"_a, "features"_a,
             "columns"_a, "separate"_a, "slots"_a, "Bytes of workspace that routed_mlp needs.");
  module.attr("LAUNCHES") = launches.positions();
  module.attr("TILE_VARIANTS") = tile_variants(false);
  module.attr("WIDE_TILE_VARIANTS") = tile_variants(true);
}
