"""The handlers of the extension as jax functions. Sizes stay on the device; the workspace is an additional result.

An absent operand or result is an array without elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from . import extension
from .activation import KernelActivation
from .versions import vary, varying_axes


class Layout(IntEnum):
    """The operand that is read transposed; equal to ``Layout`` in csrc."""

    NT = 0  # [T, K] x [G, N, K] -> [T, N]
    NN = 1  # [T, K] x [G, K, N] -> [T, N]
    TN = 2  # [T, M] x [T, N] -> [G, M, N]


class GemmArrays(NamedTuple):
    """The arrays of ``row_scale * (a b + bias) + into`` for every group; None for absent ones."""

    a: Array
    b: Array
    sizes: Array
    bias: Array | None = None
    row_scale: Array | None = None
    into: Array | None = None


class BackwardOperands(NamedTuple):
    """The arrays that the backward of a linear with an activation reads; ``dy``: the gradient of the next linear."""

    dy: Array
    w: Array
    sizes: Array
    preact: Array
    scales: Array | None


def grouped_gemm(layout: Layout, dtype: DTypeLike, o: GemmArrays) -> Array:
    """One product per group, for feature counts divisible by 8.

    Supports ``row_scale``, and zeroes the tail of the rows.
    """
    workspace = extension.kernels().library.workspace_bytes(o.sizes.shape[0])
    return _product("grouped_gemm", layout, dtype, o, (_or_empty(o.row_scale, np.float32),), workspace)


def ragged_gemm(layout: Layout, dtype: DTypeLike, o: GemmArrays) -> Array:
    """:func:`grouped_gemm` for any feature counts, without ``row_scale``."""
    workspace = extension.kernels().library.ragged_workspace_bytes(o.sizes.shape[0])
    return _product("ragged_gemm", layout, dtype, o, (), workspace)


def _product(
    name: str, layout: Layout, dtype: DTypeLike, o: GemmArrays, scale: tuple[Array, ...], workspace: int
) -> Array:
    """Calls a product. ``into`` is updated in place if XLA can donate it, and copied first otherwise."""
    result = jax.ShapeDtypeStruct(output_shape(layout, o.a, o.b, o.sizes), dtype)
    operands = (o.a, o.b, o.sizes, _or_empty(o.bias, o.a.dtype), *scale, _or_empty(o.into, dtype))
    accumulate = o.into is not None
    attributes = {
        "layout": np.int64(layout),
        "accumulate": accumulate,
        "zero_tail": not accumulate and layout is not Layout.TN,
    }
    aliases = {len(operands) - 1: 0} if accumulate else {}
    return _call(name, (result, _bytes(workspace)), operands, attributes, aliases)[0]


def linear_activation(layout: Layout, spec: KernelActivation, keep_preact: bool, o: GemmArrays) -> tuple[Array, Array]:
    """The hidden rows [T, F] times their scales, and the pre-activation [T, C]; without elements if it is not kept."""
    rows, columns = output_shape(layout, o.a, o.b, o.sizes)
    hidden = jax.ShapeDtypeStruct((rows, spec.columns(columns)), o.a.dtype)
    preact = jax.ShapeDtypeStruct((rows, columns) if keep_preact else (0, columns), o.a.dtype)
    workspace = extension.kernels().library.workspace_bytes(o.sizes.shape[0])
    postact, preact, _ = _call(
        "linear_activation",
        (hidden, preact, _bytes(workspace)),
        (*o[:3], _or_empty(o.bias, o.a.dtype), _or_empty(o.row_scale, np.float32)),
        {"layout": np.int64(layout), **spec.attributes(hidden.shape[1])},
    )
    return postact, preact


def linear_activation_backward(
    layout: Layout, spec: KernelActivation, bias_dtype: DTypeLike | None, o: BackwardOperands
) -> tuple[Array, Array, Array, Array]:
    """The gradients of pre-activation, scales [T] and bias [G, C], and the recomputed hidden rows.

    Without scales, or without a dtype of a bias, their gradient has no elements.
    """
    (rows, columns), groups = output_shape(layout, *o[:3]), o.sizes.shape[0]
    bias_columns = 0 if bias_dtype is None else o.preact.shape[1]
    workspace = extension.kernels().library.backward_workspace_bytes(
        groups=groups, tokens=rows, columns=columns, dscales=o.scales is not None, bias_columns=bias_columns, dvectors=0
    )
    dscales = _or_empty(o.scales, np.float32)
    results = (
        jax.ShapeDtypeStruct(o.preact.shape, o.dy.dtype),
        jax.ShapeDtypeStruct(dscales.shape, dscales.dtype),
        jax.ShapeDtypeStruct((rows, columns), o.dy.dtype),
        jax.ShapeDtypeStruct((groups if bias_columns else 0, o.preact.shape[1]), bias_dtype or np.float32),
        _bytes(workspace),
    )
    attributes = {"layout": np.int64(layout), **spec.attributes(columns)}
    dpreact, dscales, postact, dbias, _ = _call("linear_activation_backward", results, (*o[:4], dscales), attributes)
    return dpreact, dscales, postact, dbias


def column_sums(dtype: DTypeLike, rows: Array, sizes: Array, scale: Array | None) -> Array:
    """The sums of the rows of each group [G, N], each row times its scale in float32."""
    (tokens, columns), groups = rows.shape, sizes.shape[0]
    workspace = extension.kernels().library.column_sums_workspace(tokens=tokens, columns=columns, groups=groups)
    results = (jax.ShapeDtypeStruct((groups, columns), dtype), _bytes(workspace))
    return _call("column_sums", results, (rows, sizes, _or_empty(scale, np.float32).astype(np.float32)))[0]


def row_dots(rows: Array, vectors: Array, sizes: Array) -> Array:
    """The dot product of every row with the vector of its group, in float32 [T]; zero past the last group."""
    vectors = vectors if vectors.dtype == rows.dtype else vectors.astype(np.float32)
    return _call("row_dots", (jax.ShapeDtypeStruct(rows.shape[:1], np.float32),), (rows, vectors, sizes))[0]


def output_shape(layout: Layout, a: Array, b: Array, sizes: Array) -> tuple[int, ...]:
    """The shape of a product's result."""
    if layout is Layout.TN:
        return sizes.shape[0], a.shape[1], b.shape[1]
    return a.shape[0], b.shape[1 if layout is Layout.NT else 2]


def _call(
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[Array],
    attributes: Mapping[str, object] = MappingProxyType({}),
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> list[Array]:
    """Makes a custom call.

    ``vmap`` runs the calls one after another; inside ``shard_map`` all operands vary along the same axes.
    """
    axes = varying_axes(*operands)
    call = jax.ffi.ffi_call(
        extension.kernels().target(name), results, vmap_method="sequential", input_output_aliases=dict(aliases)
    )
    return [vary(result, axes) for result in call(*[vary(operand, axes) for operand in operands], **attributes)]


def _or_empty(array: Array | None, dtype: DTypeLike) -> Array:
    return jnp.zeros((0,), dtype) if array is None else array


def _bytes(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), np.uint8)
