"""The same functions on any device by jax's ``ragged_dot``: sums in at least float32, rounded once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .activation import KernelActivation, activate
from .calls import BackwardOperands, GemmArrays, Layout, output_shape

_WGRAD = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def product(layout: Layout, dtype: DTypeLike, o: GemmArrays) -> Array:
    """One product per group. Rows past the last group are zero, or keep the value in ``into``."""
    out = _multiply(layout, *o[:3], jnp.promote_types(dtype, jnp.float32))
    if o.bias is not None:
        out = out + of_rows(o.bias, o.sizes, o.a.shape[0]).astype(out.dtype)
    if o.row_scale is not None:
        out = jnp.where(in_a_group(o.sizes, o.a.shape[0])[:, None], out * o.row_scale[:, None].astype(out.dtype), 0)
    return (out if o.into is None else o.into.astype(out.dtype) + out).astype(dtype)


def _multiply(layout: Layout, a: Array, b: Array, sizes: Array, dtype: DTypeLike) -> Array:
    if a.size == 0 or b.size == 0:
        return jnp.zeros(output_shape(layout, a, b, sizes), dtype)
    sizes = fitting(sizes, a.shape[0])
    if layout is Layout.TN:
        return jax.lax.ragged_dot_general(a, b, sizes, _WGRAD, preferred_element_type=dtype)
    weights = jnp.swapaxes(b, 1, 2) if layout is Layout.NT else b
    return jax.lax.ragged_dot(a, weights, sizes, preferred_element_type=dtype)


def linear_activation(layout: Layout, spec: KernelActivation, keep_preact: bool, o: GemmArrays) -> tuple[Array, Array]:
    """See :func:`calls.linear_activation`."""
    preact = product(layout, o.a.dtype, o._replace(row_scale=None))
    return postact(preact, spec, o.row_scale), preact if keep_preact else preact[:0]


def postact(preact: Array, spec: KernelActivation, scales: Array | None) -> Array:
    """The activation times the scales of the rows, in the dtype of the pre-activation."""
    value = activate(preact, spec)
    return (value if scales is None else value * scales[:, None].astype(value.dtype)).astype(preact.dtype)


def linear_activation_backward(
    layout: Layout, spec: KernelActivation, bias_dtype: DTypeLike | None, o: BackwardOperands
) -> tuple[Array, Array, Array, Array]:
    """See :func:`calls.linear_activation_backward`."""
    dpostact = product(layout, jnp.promote_types(o.dy.dtype, jnp.float32), GemmArrays(*o[:3]))
    return through_activation(dpostact, spec, bias_dtype, o)


def through_activation(
    dpostact: Array, spec: KernelActivation, bias_dtype: DTypeLike | None, o: BackwardOperands
) -> tuple[Array, Array, Array, Array]:
    """The gradients of :func:`linear_activation_backward`, from the gradient of the scaled hidden rows."""
    sizes, preact, scales = o[2:]
    value, pull = jax.vjp(lambda rows: activate(rows, spec), preact.astype(dpostact.dtype))
    factor = 1 if scales is None else scales[:, None].astype(value.dtype)
    (dpreact,) = pull(dpostact * factor)
    dpreact = dpreact.astype(preact.dtype)
    valid = in_a_group(sizes, value.shape[0])
    dscales = jnp.zeros((0,), jnp.float32)
    if scales is not None:
        dscales = jnp.where(valid, jnp.sum(dpostact * value, axis=1), 0).astype(scales.dtype)
    dbias = jnp.zeros((0, preact.shape[1]), jnp.float32)
    if bias_dtype is not None:
        dbias = column_sums(bias_dtype, dpreact, sizes, None)
    return dpreact, dscales, (value * factor).astype(preact.dtype), dbias


def column_sums(dtype: DTypeLike, rows: Array, sizes: Array, scale: Array | None) -> Array:
    """See :func:`calls.column_sums`."""
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    wide = wide if scale is None else wide * scale[:, None].astype(wide.dtype)
    wide = jnp.where(in_a_group(sizes, rows.shape[0])[:, None], wide, 0)
    groups = group_of_rows(sizes, rows.shape[0])
    return jax.ops.segment_sum(wide, groups, num_segments=sizes.shape[0]).astype(dtype)


def row_dots(rows: Array, vectors: Array, sizes: Array) -> Array:
    """See :func:`calls.row_dots`; in float64 for rows of that dtype."""
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    dots = jnp.sum(wide * of_rows(vectors, sizes, rows.shape[0]).astype(wide.dtype), axis=1)
    return jnp.where(in_a_group(sizes, rows.shape[0]), dots, 0)


def of_rows(vectors: Array, sizes: Array, rows: int) -> Array:
    """Gathers for each row [T, N] the vector of its group from [G, N]; zero past the last group."""
    return jnp.where(in_a_group(sizes, rows)[:, None], vectors[group_of_rows(sizes, rows)], 0)


def group_of_rows(sizes: Array, rows: int) -> Array:
    """The group of each row [T]; the last one for rows past the last group."""
    groups = jnp.searchsorted(group_ends(sizes, rows), jnp.arange(rows, dtype=sizes.dtype), side="right")
    return jnp.minimum(groups, sizes.shape[0] - 1)


def in_a_group(sizes: Array, rows: int) -> Array:
    """Whether each row [T] belongs to a group."""
    return jnp.arange(rows, dtype=sizes.dtype) < jnp.max(group_ends(sizes, rows), initial=0)


def fitting(sizes: Array, rows: int) -> Array:
    """The sizes [G] after clipping; see :func:`group_ends`."""
    return jnp.diff(group_ends(sizes, rows), prepend=0)


def group_ends(sizes: Array, rows: int) -> Array:
    """The end row of each group [G], as in the kernels: negative sizes count as 0, rows past the end are cut off."""
    fitting = jnp.clip(sizes, 0, rows)
    ends: Array = jax.lax.associative_scan(lambda a, b: jnp.minimum(a, rows - b) + b, fitting)  # cannot overflow
    return ends
