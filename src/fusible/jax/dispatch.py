"""The choice between a kernel of the extension and jax's own product, made by the operands while a call is traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import calls, extension, fallback
from .activation import KernelActivation
from .calls import Layout, output_shape
from .errors import RefusedError
from .settings import active
from .versions import vary_alike

MAX_GROUPS = 512
MAX_ROWS = 2**30 - 1
_CHOSEN = "config(backend='xla') asks for jax.lax.ragged_dot"
_SIXTEEN_BITS = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_FLOATS = (*_SIXTEEN_BITS, np.dtype(np.float32))


def product(
    layout: Layout,
    dtype: Any,
    a: Any,
    b: Any,
    sizes: Any,
    bias: Any = None,
    row_scale: Any = None,
    into: Any = None,
) -> jax.Array:
    """``out = row_scale * (a b + bias) + into`` for every group, in ``dtype``."""
    why = operands_refusal(a, b, dtype, sizes, bias)
    kernel = partial(_product_kernel, layout, dtype)
    return _run(why, kernel, partial(fallback.product, layout, dtype), a, b, sizes, bias, row_scale, into)


def _product_kernel(
    layout: Layout, dtype: Any, a: Any, b: Any, sizes: Any, bias: Any, row_scale: Any, into: Any
) -> jax.Array:
    """Runs the kernel: tensor maps need feature counts divisible by 8, others take the ragged kernel, without scales.

    The ragged kernel skips groups that exceed the rows, so their sizes are clipped first.
    """
    if a.size == 0 or b.size == 0:
        return fallback.product(layout, dtype, a, b, sizes, bias, row_scale, into)
    if a.shape[1] % 8 == 0 and output_shape(layout, a, b, sizes)[-1] % 8 == 0:
        scale = None if row_scale is None else row_scale.astype(jnp.float32)
        return calls.grouped_gemm(layout, dtype, a, b, sizes, bias, scale, into)
    sizes = fallback.fitting(sizes, a.shape[0])
    if row_scale is None:
        return calls.ragged_gemm(layout, dtype, a, b, sizes, bias, into)
    rows = calls.ragged_gemm(layout, np.dtype(np.float32), a, b, sizes, bias, None)
    valid = fallback.in_a_group(sizes, a.shape[0])[:, None]
    return jnp.where(valid, rows * row_scale[:, None].astype(rows.dtype), 0).astype(dtype)


def linear_activation(
    layout: Layout, spec: KernelActivation, keep_preact: bool, x: Any, w: Any, sizes: Any, bias: Any, scales: Any
) -> tuple[jax.Array, jax.Array]:
    """The hidden rows times their scales, and the pre-activation; without elements if it is not kept."""
    rows, columns = output_shape(layout, x, w, sizes)
    if _is_apart(spec, x.shape[1], spec.columns(columns), rows):
        preact = product(layout, x.dtype, x, w, sizes, bias)
        return fallback.postact(preact, spec, scales), preact
    why = operands_refusal(x, w, x.dtype, sizes, bias) or _scales_refusal(scales)
    arguments = layout, spec, keep_preact
    kernel, other = (partial(module.linear_activation, *arguments) for module in (calls, fallback))
    results: tuple[jax.Array, jax.Array] = _run(why, kernel, other, x, w, sizes, bias, scales)
    return results


def linear_activation_backward(
    layout: Layout, spec: KernelActivation, bias_dtype: Any, dy: Any, w: Any, sizes: Any, preact: Any, scales: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The gradients of pre-activation, scales and bias, and the hidden rows again; see :mod:`calls`."""
    rows, columns = output_shape(layout, dy, w, sizes)
    if _is_apart(spec, dy.shape[1], columns, rows):
        dpostact = product(layout, jnp.promote_types(dy.dtype, jnp.float32), dy, w, sizes)
        return fallback.through_activation(dpostact, spec, bias_dtype, sizes, preact, scales)
    why = operands_refusal(dy, w, dy.dtype, sizes, None) or _scales_refusal(scales)
    arguments = layout, spec, bias_dtype
    kernel, other = (partial(module.linear_activation_backward, *arguments) for module in (calls, fallback))
    results: tuple[jax.Array, jax.Array, jax.Array, jax.Array] = _run(why, kernel, other, dy, w, sizes, preact, scales)
    return results


def column_sums(dtype: Any, rows: Any, sizes: Any, scale: Any = None) -> jax.Array:
    """The sums of the rows of each group, each row times its scale."""
    why = None if rows.dtype in _FLOATS and dtype in _FLOATS else f"needs rows of 16 or 32 bits, got {rows.dtype}"
    return _run(
        why or _empty_refusal(rows),
        partial(_column_sums_kernel, dtype),
        partial(fallback.column_sums, dtype),
        rows,
        sizes,
        scale,
    )


def _column_sums_kernel(dtype: Any, rows: Any, sizes: Any, scale: Any) -> jax.Array:
    return calls.column_sums(dtype, rows, sizes, None if scale is None else scale.astype(jnp.float32))


def row_dots(rows: Any, vectors: Any, sizes: Any) -> jax.Array:
    """The dot product of every row with the vector of its group, in at least float32."""
    why = None if rows.dtype in _FLOATS else f"needs rows of 16 or 32 bits, got {rows.dtype}"
    return _run(why or _empty_refusal(rows), _row_dots_kernel, fallback.row_dots, rows, vectors, sizes)


def _row_dots_kernel(rows: Any, vectors: Any, sizes: Any) -> jax.Array:
    is_read = vectors.dtype in (rows.dtype, np.dtype(np.float32))
    return calls.row_dots(rows, vectors if is_read else vectors.astype(jnp.float32), sizes)


def operands_refusal(a: Any, b: Any, dtype: Any, sizes: Any, bias: Any) -> str | None:
    """The reason why no kernel multiplies these operands on any device, or None."""
    if a.dtype not in _SIXTEEN_BITS or b.dtype != a.dtype:
        return f"needs bfloat16 or float16 operands, got {a.dtype} and {b.dtype}"
    if dtype not in (a.dtype, np.dtype(np.float32)):
        return f"gives {a.dtype} or float32, not {np.dtype(dtype)}"
    if not 1 <= sizes.shape[0] <= MAX_GROUPS:
        return f"takes 1 to {MAX_GROUPS} groups, got {sizes.shape[0]}"
    if a.shape[0] > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows, got {a.shape[0]}"
    if bias is not None and bias.dtype not in _FLOATS:
        return f"needs a bias of 16 or 32 bits, got {bias.dtype}"
    return None


def _scales_refusal(scales: Any) -> str | None:
    return None if scales is None or scales.dtype in _FLOATS else f"needs probs of 16 or 32 bits, got {scales.dtype}"


def _empty_refusal(rows: Any) -> str | None:
    return None if rows.size else "has nothing to do"


def _is_apart(spec: KernelActivation, depth: int, columns: int, rows: int) -> bool:
    """Whether the activation runs as a separate step after the product, because no kernel has it in its epilogue."""
    return spec.refusal(columns) is not None or depth % 8 != 0 or rows == 0


def device_refusal() -> str | None:
    """The reason why no kernel runs in this process, whatever the operands, or None."""
    if active().backend == "xla":
        return _CHOSEN
    why = extension.unavailable()
    return why if why is not None or active().backend == "hopper" else extension.device_refusal()


def _run(why: str | None, kernel: Callable[..., Any], other: Callable[..., Any], *operands: Any) -> Any:
    """Runs the kernel on GPUs unless it is refused, and jax elsewhere. ``vmap`` runs the calls one after another."""
    operands = vary_alike(*operands)
    default = jax.custom_batching.sequential_vmap(other)
    why = device_refusal() or why
    if why is None:
        return jax.lax.platform_dependent(*operands, default=default, **{extension.kernels().platform: kernel})
    _tell(why)
    return default(*operands)


def _tell(why: str) -> None:
    if why == _CHOSEN or why == "has nothing to do":
        return
    if active().strict:
        raise RefusedError(f"fusible.jax: strict=True, but the Hopper backend {why}")
    if jax.default_backend() == "gpu":
        _warn_once(why)


@cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"fusible.jax: jax.lax.ragged_dot runs instead of our kernels: the Hopper backend {why}", stacklevel=2
    )
