"""The handlers of the extension as jax functions. Sizes stay on the device; the workspace is an additional result.

An absent operand or result is an array without elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import extension
from .activation import KernelActivation
from .versions import vary, varying_axes


class Layout(IntEnum):
    """The operand that is read transposed; equal to ``Layout`` in csrc."""

    NT = 0  # [T, K] x [G, N, K] -> [T, N]
    NN = 1  # [T, K] x [G, K, N] -> [T, N]
    TN = 2  # [T, M] x [T, N] -> [G, M, N]


def grouped_gemm(
    layout: Layout, dtype: Any, a: Any, b: Any, sizes: Any, bias: Any, row_scale: Any, into: Any
) -> jax.Array:
    """One product per group, for feature counts divisible by 8.

    Supports ``row_scale``, and zeroes the tail of the rows.
    """
    shape = output_shape(layout, a, b, sizes)
    workspace = extension.kernels().library.workspace_bytes(sizes.shape[0])
    operands = (a, b, sizes, _or_empty(bias, a.dtype), _or_empty(row_scale, np.float32), _or_empty(into, dtype))
    return _product("grouped_gemm", layout, jax.ShapeDtypeStruct(shape, dtype), operands, into, workspace)


def ragged_gemm(layout: Layout, dtype: Any, a: Any, b: Any, sizes: Any, bias: Any, into: Any) -> jax.Array:
    """:func:`grouped_gemm` for any feature counts."""
    shape = output_shape(layout, a, b, sizes)
    workspace = extension.kernels().library.ragged_workspace_bytes(sizes.shape[0])
    operands = (a, b, sizes, _or_empty(bias, a.dtype), _or_empty(into, dtype))
    return _product("ragged_gemm", layout, jax.ShapeDtypeStruct(shape, dtype), operands, into, workspace)


def _product(name: str, layout: Layout, result: Any, operands: Sequence[Any], into: Any, workspace: int) -> jax.Array:
    """Calls a product. ``into`` is updated in place if XLA can donate it, and copied first otherwise."""
    out, _ = _call(
        name,
        (result, _bytes(workspace)),
        operands,
        aliases={} if into is None else {len(operands) - 1: 0},
        layout=np.int64(layout),
        accumulate=into is not None,
        zero_tail=into is None and layout is not Layout.TN,
    )
    return out


def linear_activation(
    layout: Layout, spec: KernelActivation, keep_preact: bool, x: Any, w: Any, sizes: Any, bias: Any, scales: Any
) -> tuple[jax.Array, jax.Array]:
    """The hidden rows [T, F] times their scales, and the pre-activation [T, C]; without elements if it is not kept."""
    rows, columns = output_shape(layout, x, w, sizes)
    hidden = jax.ShapeDtypeStruct((rows, spec.columns(columns)), x.dtype)
    preact = jax.ShapeDtypeStruct((rows, columns) if keep_preact else (0, columns), x.dtype)
    workspace = extension.kernels().library.workspace_bytes(sizes.shape[0])
    postact, preact, _ = _call(
        "linear_activation",
        (hidden, preact, _bytes(workspace)),
        (x, w, sizes, _or_empty(bias, x.dtype), _or_empty(scales, np.float32)),
        layout=np.int64(layout),
        **spec.attributes(hidden.shape[1]),
    )
    return postact, preact


def linear_activation_backward(
    layout: Layout, spec: KernelActivation, bias_dtype: Any, dy: Any, w: Any, sizes: Any, preact: Any, scales: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The gradients of pre-activation, scales [T] and bias [G, C], and the recomputed hidden rows.

    Without scales, or without a dtype of a bias, their gradient has no elements.
    """
    (rows, columns), groups = output_shape(layout, dy, w, sizes), sizes.shape[0]
    bias_columns = 0 if bias_dtype is None else preact.shape[1]
    workspace = extension.kernels().library.backward_workspace_bytes(
        groups=groups,
        tokens=rows,
        columns=columns,
        dscales=scales is not None,
        bias_columns=bias_columns,
        dvectors=0,
    )
    dscales = _or_empty(scales, np.float32)
    results = (
        jax.ShapeDtypeStruct(preact.shape, dy.dtype),
        jax.ShapeDtypeStruct(dscales.shape, dscales.dtype),
        jax.ShapeDtypeStruct((rows, columns), dy.dtype),
        jax.ShapeDtypeStruct((groups if bias_columns else 0, preact.shape[1]), bias_dtype or np.float32),
        _bytes(workspace),
    )
    operands = (dy, w, sizes, preact, dscales)
    *grads, _ = _call(
        "linear_activation_backward", results, operands, layout=np.int64(layout), **spec.attributes(columns)
    )
    dpreact, dscales, postact, dbias = grads
    return dpreact, dscales, postact, dbias


def column_sums(dtype: Any, rows: Any, sizes: Any, scale: Any) -> jax.Array:
    """The sums of the rows of each group [G, N], each row times its scale in float32."""
    (tokens, columns), groups = rows.shape, sizes.shape[0]
    workspace = extension.kernels().library.column_sums_workspace(tokens=tokens, columns=columns, groups=groups)
    results = (jax.ShapeDtypeStruct((groups, columns), dtype), _bytes(workspace))
    return _call("column_sums", results, (rows, sizes, _or_empty(scale, np.float32)))[0]


def row_dots(rows: Any, vectors: Any, sizes: Any) -> jax.Array:
    """The dot product of every row with the vector of its group, in float32 [T]; zero past the last group."""
    return _call("row_dots", (jax.ShapeDtypeStruct(rows.shape[:1], np.float32),), (rows, vectors, sizes))[0]


def output_shape(layout: Layout, a: Any, b: Any, sizes: Any) -> tuple[int, ...]:
    """The shape of a product's result."""
    if layout is Layout.TN:
        return sizes.shape[0], a.shape[1], b.shape[1]
    return a.shape[0], b.shape[1 if layout is Layout.NT else 2]


def _call(
    name: str, results: Sequence[Any], operands: Sequence[Any], aliases: dict[int, int] | None = None, **attributes: Any
) -> Any:
    """Makes a custom call.

    ``vmap`` runs the calls one after another; inside ``shard_map`` all operands vary along the same axes.
    """
    axes = varying_axes(*operands)
    call = jax.ffi.ffi_call(
        extension.kernels().target(name), results, vmap_method="sequential", input_output_aliases=aliases or {}
    )
    return [vary(result, axes) for result in call(*[vary(operand, axes) for operand in operands], **attributes)]


def _or_empty(array: Any, dtype: Any) -> Any:
    return jnp.zeros((0,), dtype) if array is None else array


def _bytes(count: int) -> Any:
    return jax.ShapeDtypeStruct((count,), np.uint8)
