"""``grouped_gemm`` and ``ragged_dot``: one matrix product per group, differentiable in all operands but the sizes."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from . import dispatch
from .calls import GemmArrays, Layout
from .checks import ArgumentError, check_array, check_depths, check_one_dtype, check_shape, check_sharding, check_sizes
from .versions import vary_alike


def grouped_gemm(
    lhs: Array,
    rhs: Array,
    *,
    first_dims: Array | None = None,
    last_dims: Array | None = None,
    transpose_rhs: bool = False,
    bias: Array | None = None,
    into: Array | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """One matrix product for each of G groups, whose sizes stay on the device.

    =========================================  ================  ============  ============
    sizes                                      lhs               rhs           result
    =========================================  ================  ============  ============
    ``first_dims``: the rows are ragged        [..., K]          [G, K, N]     [..., N]
    ``first_dims`` with ``transpose_rhs``      [..., K]          [G, N, K]     [..., N]
    ``last_dims``: the contraction is ragged   [..., M]          [..., N]      [G, M, N]
    =========================================  ================  ============  ============

    The leading dimensions of lhs, and of a ragged rhs, count as one. Rows are sorted by group. Rows past the last group
    are ignored, whatever their values, and are zero in the result and in gradients. A size below 0 counts as 0,
    and sizes beyond the number of rows are cut off. There is no forward mode. Sums are in float32, and rounded once.
    Use ``transpose_rhs`` rather than transposing the weights, which XLA would carry out.

    Args:
        lhs, rhs: of one dtype. Hopper's kernels take bfloat16 and float16, and any shapes.
        first_dims, last_dims: int32 or int64 [G], one of them.
        transpose_rhs: rhs is [G, N, K].
        bias: [G, N], added to the rows of each group; with ``first_dims``.
        into: an array of the result's shape and dtype to which the product is added. It is overwritten if it is
            donated, or not used again.
        preferred_element_type: dtype of the result; None: that of ``into``, or of the operands.

    Raises:
        ArgumentError: operands do not fit; raised while tracing.
    """
    ragged_depth = last_dims is not None
    if (first_dims is not None) == ragged_depth:
        raise ArgumentError("grouped_gemm: give first_dims or last_dims, and not both")
    if ragged_depth and (transpose_rhs or bias is not None):
        raise ArgumentError("grouped_gemm: transpose_rhs and bias are for first_dims")
    sizes = last_dims if ragged_depth else first_dims
    assert sizes is not None
    _check_operands(lhs, rhs, sizes, ragged_depth, transpose_rhs)
    check_sharding(_NAME, lhs, rhs, sizes, bias, into)
    a = as_rows(lhs)
    layout, b = (Layout.NT if transpose_rhs else Layout.NN), rhs
    if ragged_depth:
        layout, b = Layout.TN, as_rows(rhs)
    columns = b.shape[1 if layout is Layout.NT else -1]
    shape = (sizes.shape[0], a.shape[1], columns) if ragged_depth else (*lhs.shape[:-1], columns)
    if bias is not None:
        check_shape(_NAME, "bias", bias, (sizes.shape[0], columns))
    dtype = _result_dtype(lhs.dtype, preferred_element_type, into, shape)
    rows = into if into is None or ragged_depth else as_rows(into)
    return _product(layout, dtype, *vary_alike(a, b, sizes, bias, rows)).reshape(shape)


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    out_sharding: jax.sharding.Sharding | None = None,
) -> Array:
    """A replacement of ``jax.lax.ragged_dot``: [T, K] x [G, K, N] -> [T, N], for rows that are sorted by group.

    Args:
        lhs, rhs, group_sizes: as in ``jax.lax.ragged_dot``; the sizes are int32 or int64.
        precision: not supported; sums are in float32.
        preferred_element_type: dtype of the result; None: that of the operands.
        group_offset, out_sharding: not supported.

    Raises:
        ArgumentError: operands do not fit, or an argument is not supported; raised while tracing.
    """
    fixes = {"group_offset": "slice the weights", "out_sharding": "use shard_map"}
    for name, value in (("group_offset", group_offset), ("out_sharding", out_sharding)):
        if value is not None:
            raise ArgumentError(f"ragged_dot: {name} is not supported; {fixes[name]}")
    if precision not in (None, "default", jax.lax.Precision.DEFAULT):
        raise ArgumentError(f"ragged_dot: precision is not supported, sums are in float32; got {precision!r}")
    check_array("ragged_dot", "lhs", lhs, 2)
    check_array("ragged_dot", "rhs", rhs, 3)
    return grouped_gemm(lhs, rhs, first_dims=group_sizes, preferred_element_type=preferred_element_type)


_NAME = "grouped_gemm"


def _check_operands(lhs: Array, rhs: Array, sizes: Array, ragged_depth: bool, transpose_rhs: bool) -> None:
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        check_array(_NAME, name, array)
        if array.ndim < 2:
            raise ArgumentError(f"grouped_gemm: {name} must have 2 dimensions or more, got shape {list(array.shape)}")
    check_one_dtype(_NAME, lhs=lhs, rhs=rhs)
    if ragged_depth:
        check_sizes(_NAME, "last_dims", sizes)
        check_depths(_NAME, ("lhs's rows", "rhs's rows"), tuple(int(np.prod(a.shape[:-1])) for a in (lhs, rhs)))  # type: ignore[arg-type]
        return
    check_array(_NAME, "rhs", rhs, 3)
    check_sizes(_NAME, "first_dims", sizes, rhs.shape[0])
    check_depths(_NAME, ("lhs", "rhs"), (lhs.shape[-1], rhs.shape[2 if transpose_rhs else 1]))


def _result_dtype(
    operands: DTypeLike, preferred: DTypeLike | None, into: Array | None, shape: tuple[int, ...]
) -> np.dtype:
    if into is not None:
        check_shape(_NAME, "into", into, shape)
    dtype: np.dtype = jnp.dtype(preferred if preferred is not None else operands if into is None else into.dtype)
    if into is not None and into.dtype != dtype:
        raise ArgumentError(f"grouped_gemm: into must be {dtype}, the dtype of the result, got {into.dtype}")
    if not jnp.issubdtype(dtype, jnp.floating) or not np.can_cast(operands, dtype, "same_kind") or dtype.itemsize == 1:
        raise ArgumentError(f"grouped_gemm: a result of {dtype} cannot hold a product of {operands}")
    return dtype


def _multiply(
    layout: Layout, dtype: DTypeLike, a: Array, b: Array, sizes: Array, bias: Array | None, into: Array | None
) -> Array:
    return dispatch.product(layout, dtype, GemmArrays(a, b, sizes, bias, None, into))


class Saved(NamedTuple):
    """The values that the forward keeps; ``accumulated``: whether the product was added to an array."""

    a: Array
    b: Array
    sizes: Array
    bias: Array | None
    accumulated: bool


def _fwd(
    layout: Layout, dtype: DTypeLike, a: Array, b: Array, sizes: Array, bias: Array | None, into: Array | None
) -> tuple[Array, Saved]:
    """The forward rule of the product. It calls the differentiable product, so second derivatives exist."""
    return _product(layout, dtype, a, b, sizes, bias, into), Saved(a, b, sizes, bias, into is not None)


def _bwd(layout: Layout, dtype: DTypeLike, saved: Saved, dout: Array) -> tuple[Array | None, ...]:
    a, b, sizes, bias, accumulated = saved
    rounded = dout.astype(a.dtype)
    da, db = _operand_grads(layout, a, b, sizes, rounded)
    dbias = None if bias is None else dispatch.column_sums(bias.dtype, dout, sizes)
    return da, db, no_gradient(sizes), dbias, dout if accumulated is True else None


def _operand_grads(layout: Layout, a: Array, b: Array, sizes: Array, dout: Array) -> tuple[Array, Array]:
    """The gradients of the operands, as differentiable products, so they can be differentiated again."""

    def product(other: Layout, left: Array, right: Array) -> Array:
        result: Array = _product(other, a.dtype, *vary_alike(left, right, sizes), None, None)
        return result

    match layout:
        case Layout.NT:
            return product(Layout.NN, dout, b), product(Layout.TN, dout, a)
        case Layout.NN:
            return product(Layout.NT, dout, b), product(Layout.TN, a, dout)
        case Layout.TN:
            return product(Layout.NT, b, dout), product(Layout.NN, a, dout)


def as_rows(array: Array) -> Array:
    """Reshapes [..., C] to [T, C], also if C is 0."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def no_gradient(sizes: Array) -> np.ndarray:
    """The gradient of an integer array, in jax's form (float0 zeros)."""
    return np.zeros(sizes.shape, jax.dtypes.float0)


_product = jax.custom_vjp(_multiply, nondiff_argnums=(0, 1))
_product.defvjp(_fwd, _bwd)
