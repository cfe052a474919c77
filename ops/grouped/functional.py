"""``grouped_gemm``: E matrix products in one call, ragged in any dimension."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import ArgumentError, Gradient, Grads, Op
from ...fuser.contract.config import constant
from ...fuser.contract.spec import layout_of, not_dense
from ...fuser.runtime.autograd import Runtime, run
from .. import kernels
from ..kernels import Layout, Terms
from ..values.checks import is_dense, is_free_to_read
from ..values.grouped_tensor import GroupedTensor
from .product import Factor, Product, output, output_shape, shape_to_allocate
from .product_checks import check_factors, check_output, check_types


def grouped_gemm(
    a: Tensor | GroupedTensor,
    b: Tensor | GroupedTensor,
    split_sizes: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    layout: str = "NT",
    out: Tensor | GroupedTensor | None = None,
    accumulate: bool = False,
    alpha: Factor = None,
    beta: Factor = None,
    bias: Tensor | None = None,
    out_elements: int | None = None,
) -> Tensor | GroupedTensor:
    """``out_g = alpha_g * A_g B_g + bias_g + beta_g * out_g`` for every group g.

    ======  ==================  ==================  ==============  =====================================
    layout  ``A_g`` from a      ``B_g`` from b      ``out_g``       with plain tensors
    ======  ==================  ==================  ==============  =====================================
    "NT"    [M_g, K_g]          [N_g, K_g], as B^T  [M_g, N_g]      a [T, K], b [E, N, K] -> [T, N]
    "NN"    [M_g, K_g]          [K_g, N_g]          [M_g, N_g]      a [T, K], b [E, K, N] -> [T, N]
    "TN"    [K_g, M_g], as A^T  [K_g, N_g]          [M_g, N_g]      a [T, M], b [T, N] -> [E, M, N]
    ======  ==================  ==================  ==============  =====================================

    Plain tensors have T rows sorted by group. ``split_sizes`` counts the rows of each group, or ``offsets`` gives their
    ends. Rows past the last group are ignored, and are zero in results allocated here. A :class:`GroupedTensor` has its
    own dims; those of the output follow from the operands. Differentiable in a, b and bias, but not with ``out``.

    Args:
        a, b: operands, of one dtype, on one device.
        split_sizes, offsets: int32 or int64 [E], one of them: the number of rows of each group, or its end.
        layout: see above.
        out: the tensor to write to; it is returned.
        accumulate: add to ``out``: beta = 1. In 16 bits a GPU rounds the product, then the sum; a CPU the sum alone.
        alpha, beta: numbers, or tensors [E]. Not differentiable. If beta is the number 0, ``out`` is not read.
        bias: [E, N].
        out_elements: the number of elements to allocate if the operands' shapes do not bound the output: if both its
            dims are ragged, or one and the depth. Without it and without ``out``, the call waits for the device. Unused
            elements are zero; a group that does not fit is left out. Gradients never wait.

    Returns:
        A tensor if both operands are tensors, else a :class:`GroupedTensor`.

    Raises:
        ArgumentError: operands do not fit, beta or accumulate lack ``out``, or ``out`` excludes gradients of operands.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(a, b, split_sizes, offsets, layout, out, accumulate, alpha, beta, bias, out_elements)
    check_types(a=a, b=b, bias=bias, out=out)
    folded, b = _fold_transpose(layout, b)
    product = _product_of(a, b, _sizes(split_sizes, offsets), folded, alpha)
    check_factors(product, bias, beta)
    check_output(product, out, out_elements, accumulate, beta, {"a": product.a.data, "b": product.b.data, "bias": bias})
    if out is not None:
        return _multiply_into(out, product, bias, _beta_or_none(accumulate, beta))
    product = product._replace(shape=shape_to_allocate(product, out_elements))
    keywords = {"b": product.b.data, "product": product} | ({} if bias is None else {"bias": bias})
    data = run(_GroupedGemm(), product.a.data, keywords, Runtime.of(product.a.data))[0]
    return data if isinstance(a, Tensor) and isinstance(b, Tensor) else output(product, data)


def _traced(a: Any, b: Any, *arguments: Any) -> Tensor | GroupedTensor:
    """The call under Dynamo: a node of the graph for plain tensors, a graph break for others."""
    from ...fuser.dynamo.frontend import graph_break

    _register_with_dynamo()
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        product: Tensor = _in_graph(a, b, *arguments)
        return product
    graph_break(msg="grouped_gemm: a GroupedTensor cannot be part of a graph")
    groups: GroupedTensor = _uncompiled[0](a, b, *arguments)
    return groups


_KEYWORDS = ("offsets", "layout", "out", "accumulate", "alpha", "beta", "bias", "out_elements")


def _in_graph(a: Any, b: Any, split_sizes: Any, *others: Any) -> Any:
    """:func:`grouped_gemm` with all arguments by position, as graphs store them."""
    return grouped_gemm(a, b, split_sizes, **dict(zip(_KEYWORDS, others, strict=True)))


_uncompiled: list[Any] = []  # of the wrapper that Dynamo does not look into, once a call has been traced


@constant
def _register_with_dynamo() -> None:
    """Registers the call with Dynamo when it is first traced, as its decorators import the compiler."""
    if not _uncompiled:
        torch.compiler.allow_in_graph(_in_graph)  # type: ignore[no-untyped-call]
        _uncompiled.append(torch.compiler.disable(lambda *arguments: _in_graph(*arguments)))  # type: ignore[no-untyped-call]


class _GroupedGemm(Op):
    """The differentiable form: an op whose ``x`` and ``b`` are the operands' data."""

    class Saved(NamedTuple):
        x: Tensor
        b: Tensor
        product: Product

    def fwd(self, x: Tensor, *, b: Tensor, product: Product, bias: Tensor | None = None) -> tuple[Tensor, Saved]:
        return _multiply(product, bias), self.Saved(x, b, product)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        a, b = saved.product.a.with_data(saved.x), saved.product.b.with_data(saved.b)
        dc, alpha = output(saved.product, dy.contiguous()), saved.product.alpha
        by_layout = {
            Layout.NT: (Product(dc, b, Layout.NN, alpha), Product(dc, a, Layout.TN, alpha)),
            Layout.NN: (Product(dc, b, Layout.NT, alpha), Product(a, dc, Layout.TN, alpha)),
            Layout.TN: (Product(b, dc, Layout.NT, alpha), Product(a, dc, Layout.NN, alpha)),
        }
        da, db = by_layout[saved.product.layout]
        grads: dict[str, Gradient] = {
            "x": lambda: _gradient(da, a),
            "b": lambda: _gradient(db, b),
        }
        if "bias" in needs_grad:
            rows, sizes = _by_rows(dc)
            grads["bias"] = kernels.column_sums(rows, sizes, dy.dtype)
        return grads


def _fold_transpose(layout: str, b: Tensor | GroupedTensor) -> tuple[Layout, Tensor | GroupedTensor]:
    """The layout and dense matrices; a transposed view is replaced by the matrices and the other layout, without a
    copy.
    """
    if not isinstance(layout, str) or layout not in Layout.__members__:
        raise ArgumentError(f"grouped_gemm: layout must be NT, NN or TN, got {layout!r}")
    stated = Layout[layout]
    if isinstance(b, Tensor) and b.dim() == 3 and not b.is_contiguous() and b.mT.is_contiguous():
        return {Layout.NT: Layout.NN, Layout.NN: Layout.NT}.get(stated, stated), b.mT
    return stated, b


def _sizes(split_sizes: Tensor | None, offsets: Tensor | None) -> Tensor | None:
    for name, sizes in (("split_sizes", split_sizes), ("offsets", offsets)):
        if isinstance(sizes, Tensor) and not is_dense(sizes):
            raise not_dense(f"grouped_gemm: {name}", layout_of(sizes))
        if sizes is not None and not (isinstance(sizes, Tensor) and sizes.dim() == 1):
            came = f"shape {list(sizes.shape)}" if isinstance(sizes, Tensor) else f"a {type(sizes).__name__}"
            raise ArgumentError(f"grouped_gemm: {name} must be an int32 or int64 tensor [E], got {came}")
        if sizes is not None and not sizes.shape[0]:
            raise ArgumentError(f"grouped_gemm: {name} must have at least one group, got shape [0]")
    if offsets is None:
        return split_sizes
    if split_sizes is not None:
        raise ArgumentError("grouped_gemm: give split_sizes or offsets, not both")
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def _product_of(
    a: Tensor | GroupedTensor, b: Tensor | GroupedTensor, sizes: Tensor | None, layout: Layout, alpha: Factor
) -> Product:
    """Both operands with their groups."""
    groups_a = a if isinstance(a, GroupedTensor) else _as_groups("a", a, sizes, ragged=True)
    groups_b = b if isinstance(b, GroupedTensor) else _as_groups("b", b, sizes, ragged=layout is Layout.TN)
    if sizes is not None and isinstance(a, GroupedTensor) and (isinstance(b, GroupedTensor) or layout is not Layout.TN):
        raise ArgumentError("grouped_gemm: a GroupedTensor has its own dims; leave split_sizes out")
    for attribute in ("dtype", "device", "num_groups"):
        if getattr(groups_a, attribute) != getattr(groups_b, attribute):
            came = f"a has {getattr(groups_a, attribute)}, b has {getattr(groups_b, attribute)}"
            raise ArgumentError(f"grouped_gemm: operands of one {attribute} expected; {came}")
    if groups_a.dtype.is_complex:
        raise ArgumentError(f"grouped_gemm: a and b must hold real numbers, got {groups_a.dtype}")
    if groups_a.dtype.itemsize == 1:
        raise ArgumentError(f"grouped_gemm: a and b must hold numbers of at least 16 bits, got {groups_a.dtype}")
    deep_a = groups_a.rows if layout is Layout.TN else groups_a.columns
    deep_b = groups_b.columns if layout is Layout.NT else groups_b.rows
    _check_depths(layout, deep_a, deep_b, groups_a.num_groups)
    return Product(groups_a, groups_b, layout, alpha)


def _check_depths(layout: Layout, deep_a: Tensor | int, deep_b: Tensor | int, groups: int) -> None:
    """Checks that the contracted dims are equal; ragged ones only if that needs no synchronisation."""
    if isinstance(deep_a, int) and isinstance(deep_b, int):
        if deep_a != deep_b:
            raise ArgumentError(
                f"grouped_gemm: {layout.value} contracts {deep_a} of a with {deep_b} of b; they must be equal"
            )
        return
    depths = [d.tolist() if is_free_to_read(d) else None for d in map(torch.as_tensor, (deep_a, deep_b))]
    if None in depths:
        return
    by_group = (d if isinstance(d, list) else [d] * groups for d in depths)
    for g, (left, right) in enumerate(zip(*by_group, strict=True)):
        if left != right:
            raise ArgumentError(f"grouped_gemm: group {g}: the depths {left} and {right} of a and b must be equal")


def _as_groups(name: str, tensor: Tensor, sizes: Tensor | None, ragged: bool) -> GroupedTensor:
    dims = 2 if ragged else 3
    if tensor.dim() != dims:
        raise ArgumentError(f"grouped_gemm: {name} must have {dims} dimensions, got shape {list(tensor.shape)}")
    if not ragged:
        return GroupedTensor(tensor.contiguous())
    if sizes is None or sizes.dtype not in (torch.int32, torch.int64):
        came = "none" if sizes is None else str(sizes.dtype)
        raise ArgumentError(f"grouped_gemm: plain tensors need split_sizes or offsets, int32 or int64 [E], got {came}")
    if sizes.device != tensor.device and sizes.device.type != "cpu":
        raise ArgumentError(
            f"grouped_gemm: split sizes must be on {tensor.device}, where {name} is, got {sizes.device}"
        )
    if is_free_to_read(sizes):
        listed = sizes.tolist()  # numbers of Python, whose sum does not wrap
        if min(listed, default=0) < 0 or sum(listed) > tensor.shape[0]:
            raise ArgumentError(
                f"grouped_gemm: split sizes {listed} do not fit into the {tensor.shape[0]} rows of {name}"
            )
    return GroupedTensor(tensor.contiguous(), sizes.to(tensor.device))


def _beta_or_none(accumulate: bool, beta: Factor) -> Factor:
    """The factor of the old ``out``; None if it is not read."""
    return 1.0 if accumulate else beta if isinstance(beta, Tensor) or beta else None


def _by_rows(t: GroupedTensor) -> tuple[Tensor, Tensor]:
    """Groups of one width as rows [T, N], and the number of rows of each."""
    rows = t.rows
    sizes = rows if isinstance(rows, Tensor) else torch.full((t.num_groups,), rows, device=t.device)
    return t.data.flatten(0, -2), sizes


def _has_one_width(product: Product) -> bool:
    """Whether only rows or only the depth are ragged, as the kernels of :class:`GroupedLinear` need."""
    one_width = product.a.last_dims is None and product.b.last_dims is None
    return one_width and (product.layout is Layout.TN or product.b.first_dims is None)


def _multiply(product: Product, bias: Tensor | None, out: GroupedTensor | None = None, beta: Factor = None) -> Tensor:
    """Computes the output's data, allocated here unless given."""
    a, b, layout, alpha, shape = product
    if _has_one_width(product):
        rows, sizes = _by_rows(a)
        other = _by_rows(b)[0] if layout is Layout.TN else b.data
        by_group = shape if out is None else tuple(out.data.shape)
        into = None if out is None else out.data if layout is Layout.TN else out.data.flatten(0, -2)
        data = kernels.grouped_gemm(layout, rows, other, sizes, out=into, terms=Terms(alpha, beta, bias))
        assert isinstance(data, Tensor)
        return data.view(by_group)
    fresh = out is None
    if out is None:
        out = output(product, a.data.new_empty(shape))
    kernels.ragged_gemm(layout, a, b, out, alpha=alpha, beta=beta, bias=bias, fresh=fresh)
    return out.data


def _multiply_into(
    out: Tensor | GroupedTensor, product: Product, bias: Tensor | None, beta: Factor
) -> Tensor | GroupedTensor:
    _multiply(product, bias, output(product, out if isinstance(out, Tensor) else out.data), beta)
    return out


def _gradient(product: Product, operand: GroupedTensor) -> Tensor:
    """The gradient of an operand, which has the operand's groups."""
    if _has_one_width(product) and output_shape(product) == tuple(operand.data.shape):
        return _multiply(product._replace(shape=tuple(operand.data.shape)), None)
    grad = operand.with_data(torch.empty_like(operand.data))
    kernels.ragged_gemm(product.layout, product.a, product.b, grad, alpha=product.alpha, fresh=True)
    return grad.data
