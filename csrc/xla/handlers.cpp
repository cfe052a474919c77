// SPDX-License-Identifier: Apache-2.0
#include "xla/handlers.h"

#include "fusible/fused_gemm.h"
#include "fusible/group_rows.h"
#include "fusible/ragged_gemm.h"
#include "xla/operands.h"

namespace fusible::xla_ffi {
namespace {

namespace ffi = ::xla::ffi;

// Every handler: no exception may leave it. They only launch, so XLA may record them in a command buffer.
template <class Body>
ffi::Error launched(const Body& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

// XLA has put the operand to be accumulated where the result goes.
void check_alias(const Buffer& into, const Buffer& out) {
  FUSIBLE_CHECK(address(into) == address(out), "what is added to must be where the result is");
}

ffi::Error grouped_gemm_call(const Call& call, Buffer a, Buffer b, Buffer sizes, Buffer bias, Buffer scale, Buffer into,
                             Result out, Result workspace, int64_t layout, bool accumulate, bool zero_tail) {
  return launched([&] {
    GroupedGemm gemm = product(layout, a, b, sizes, *workspace);
    gemm.out = matrices(*out);
    gemm.problem.output = gemm.out.type;
    gemm.epilogue.bias = vectors(bias), gemm.epilogue.row_scale = floats(scale);
    gemm.problem.scale_bias = gemm.epilogue.bias.data || gemm.epilogue.row_scale;
    gemm.accumulate = accumulate, gemm.zero_tail = zero_tail;
    if (accumulate) check_alias(into, *out);
    grouped_gemm(gemm, call.device, call.stream);
  });
}

// The matrices of a buffer: the rows of a group are its tokens and the columns the buffer's, or there is one matrix per
// group.
PackedMatrices packed(const Buffer& buffer, const SplitSizes& sizes) {
  const MatrixView view = matrices(buffer);
  const Dims rows = view.group_stride ? Dims{{}, view.group_stride / view.pitch} : Dims{sizes, 0};
  return {view.data, static_cast<int64_t>(buffer.element_count()), rows, {{}, view.pitch}};
}

// The call for column counts that are not multiples of 8, which no tensor map reaches.
ffi::Error ragged_gemm_call(const Call& call, Buffer a, Buffer b, Buffer sizes, Buffer bias, Buffer into, Result out,
                            Result workspace, int64_t layout, bool accumulate, bool zero_tail) {
  return launched([&] {
    const SplitSizes groups = split_sizes(sizes);
    RaggedGemm gemm{};
    gemm.layout = static_cast<Layout>(layout), gemm.operand = type_of(a), gemm.output = type_of(*out);
    gemm.groups = groups.groups, gemm.a = packed(a, groups), gemm.b = packed(b, groups);
    gemm.out = address(*out), gemm.out_elements = out->element_count();
    gemm.epilogue.bias = vectors(bias);
    gemm.accumulate = accumulate, gemm.zero_tail = zero_tail, gemm.workspace = address(*workspace);
    if (accumulate) check_alias(into, *out);
    ragged_gemm(gemm, call.device, call.stream);
  });
}

Activation activation_of(int64_t curve, bool gated, float alpha, float limit, float linear_offset, int64_t block) {
  return {static_cast<Curve>(curve), gated, alpha, limit, linear_offset, block, {}};
}

ffi::Error linear_activation_call(const Call& call, Buffer a, Buffer b, Buffer sizes, Buffer bias, Buffer scales,
                                  Result postact, Result preact, Result workspace, int64_t layout, int64_t curve,
                                  bool gated, float alpha, float limit, float linear_offset, int64_t block) {
  return launched([&] {
    GroupedGemm gemm = product(layout, a, b, sizes, *workspace);
    gemm.out = {address(*preact), gemm.problem.operand, gemm.problem.n, 0};
    gemm.epilogue.bias = vectors(bias), gemm.problem.scale_bias = gemm.epilogue.bias.data;
    const Activation activation = activation_of(curve, gated, alpha, limit, linear_offset, block);
    linear_activation({gemm, activation, row_scale(scales), address(*postact), {}}, call.device, call.stream);
  });
}

ffi::Error linear_activation_backward_call(const Call& call, Buffer a, Buffer b, Buffer sizes, Buffer preact,
                                           Buffer scales, Result dpreact, Result dscales, Result postact, Result dbias,
                                           Result workspace, int64_t layout, int64_t curve, bool gated, float alpha,
                                           float limit, float linear_offset, int64_t block) {
  return launched([&] {
    const GroupedGemm gemm = product(layout, a, b, sizes, *workspace);
    const Activation activation = activation_of(curve, gated, alpha, limit, linear_offset, block);
    linear_activation_backward({gemm,
                                activation,
                                row_scale(scales),
                                address(preact),
                                address(*dpreact),
                                address(*dscales),
                                address(*postact),
                                address(*dbias),
                                type_of(*dbias),
                                {},
                                {}},
                               call.device, call.stream);
  });
}

DenseRows dense_rows(const Buffer& rows) {
  const int64_t columns = size_of(rows, 2, 1);
  return {address(rows), type_of(rows), size_of(rows, 2, 0), columns, columns};
}

ffi::Error column_sums_call(const Call& call, Buffer rows, Buffer sizes, Buffer scale, Result out, Result workspace) {
  return launched([&] {
    column_sums({dense_rows(rows), floats(scale), split_sizes(sizes), address(*out), type_of(*out),
                 static_cast<float*>(address(*workspace))},
                call.device, call.stream);
  });
}

ffi::Error row_dots_call(const Call& call, Buffer rows, Buffer vectors, Buffer sizes, Result out) {
  return launched([&] {
    FUSIBLE_CHECK(type_of(*out) == DType::kFloat32, "products of rows are float32");
    row_dots(
        {dense_rows(rows), address(vectors), type_of(vectors), split_sizes(sizes), static_cast<float*>(address(*out))},
        call.device, call.stream);
  });
}

// How XLA calls a handler: with buffers, so many operands and so many results, and then with attributes.
template <int kOperands, int kResults, class Binding>
auto add_buffers(Binding&& binding) {
  if constexpr (kOperands > 0) return add_buffers<kOperands - 1, kResults>(std::move(binding).template Arg<Buffer>());
  else if constexpr (kResults > 1) return add_buffers<0, kResults - 1>(std::move(binding).template Ret<Buffer>());
  else return std::move(binding).template Ret<Buffer>();
}

template <int kOperands, int kResults>
auto buffers() {
  return add_buffers<kOperands, kResults>(ffi::Ffi::Bind().Ctx<Call>());
}

template <int kOperands, int kResults>
auto product_buffers() {
  return buffers<kOperands, kResults>()
      .template Attr<int64_t>("layout")
      .template Attr<bool>("accumulate")
      .template Attr<bool>("zero_tail");
}

template <int kOperands, int kResults>
auto activation_buffers() {
  return buffers<kOperands, kResults>()
      .template Attr<int64_t>("layout")
      .template Attr<int64_t>("curve")
      .template Attr<bool>("gated")
      .template Attr<float>("alpha")
      .template Attr<float>("limit")
      .template Attr<float>("linear_offset")
      .template Attr<int64_t>("block");
}

template <auto kFunction, auto kBinding>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
  static auto* const handler = kBinding().To(kFunction, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

// `kBinding` is a function that says how XLA calls `kFunction`.
template <auto kFunction, auto kBinding>
Handler handler(const char* name) {
  return {name, reinterpret_cast<void*>(&handle<kFunction, kBinding>)};
}

}  // namespace

const std::vector<Handler>& handlers() {
  static const std::vector<Handler> all = {
      handler<grouped_gemm_call, product_buffers<6, 2>>("grouped_gemm"),
      handler<ragged_gemm_call, product_buffers<5, 2>>("ragged_gemm"),
      handler<linear_activation_call, activation_buffers<5, 3>>("linear_activation"),
      handler<linear_activation_backward_call, activation_buffers<5, 5>>("linear_activation_backward"),
      handler<column_sums_call, buffers<3, 2>>("column_sums"),
      handler<row_dots_call, buffers<3, 1>>("row_dots"),
  };
  return all;
}

std::pair<int, int> api_version() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace fusible::xla_ffi
