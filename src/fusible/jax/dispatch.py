"""The choice between a kernel of the extension and jax's own product, made by the operands while a call is traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from . import calls, extension, fallback
from .activation import KernelActivation
from .calls import BackwardOperands, GemmArrays, Layout, output_shape
from .checks import RefusedError
from .settings import active
from .versions import vary_alike

R = TypeVar("R")

MAX_GROUPS = 4096
MAX_ROWS = 2**30 - 1
_CHOSEN = "config(backend='xla') asks for jax.lax.ragged_dot"
_SIXTEEN_BITS = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_FLOATS = (*_SIXTEEN_BITS, np.dtype(np.float32))


def product(layout: Layout, dtype: DTypeLike, o: GemmArrays) -> Array:
    """``out = row_scale * (a b + bias) + into`` for every group, in ``dtype``."""
    kernel, other = partial(_product_kernel, layout, dtype), partial(fallback.product, layout, dtype)
    return _run(operands_refusal(o, dtype), kernel, other, o)


def _product_kernel(layout: Layout, dtype: DTypeLike, o: GemmArrays) -> Array:
    """Runs the kernel: tensor maps need feature counts divisible by 8, others take the ragged kernel, without scales.

    The ragged kernel skips groups that exceed the rows, so their sizes are clipped first.
    """
    if o.a.size == 0 or o.b.size == 0:
        return fallback.product(layout, dtype, o)
    if o.a.shape[1] % 8 == 0 and output_shape(layout, *o[:3])[-1] % 8 == 0:
        scale = None if o.row_scale is None else o.row_scale.astype(jnp.float32)
        return calls.grouped_gemm(layout, dtype, o._replace(row_scale=scale))
    o = o._replace(sizes=fallback.fitting(o.sizes, o.a.shape[0]))
    if o.row_scale is None:
        return calls.ragged_gemm(layout, dtype, o)
    rows = calls.ragged_gemm(layout, np.dtype(np.float32), o._replace(into=None))
    valid = fallback.in_a_group(o.sizes, o.a.shape[0])[:, None]
    return jnp.where(valid, rows * o.row_scale[:, None].astype(rows.dtype), 0).astype(dtype)


def linear_activation(layout: Layout, spec: KernelActivation, keep_preact: bool, o: GemmArrays) -> tuple[Array, Array]:
    """The hidden rows times their scales, and the pre-activation; without elements if it is not kept."""
    rows, columns = output_shape(layout, *o[:3])
    if _is_apart(spec, o.a.shape[1], spec.columns(columns), rows):
        preact = product(layout, o.a.dtype, o._replace(row_scale=None))
        return fallback.postact(preact, spec, o.row_scale), preact
    why = operands_refusal(o, o.a.dtype) or _scales_refusal(o.row_scale)
    arguments = layout, spec, keep_preact
    kernel, other = partial(calls.linear_activation, *arguments), partial(fallback.linear_activation, *arguments)
    return _run(why, kernel, other, o)


def linear_activation_backward(
    layout: Layout, spec: KernelActivation, bias_dtype: DTypeLike | None, o: BackwardOperands
) -> tuple[Array, Array, Array, Array]:
    """The gradients of pre-activation, scales and bias, and the hidden rows again; see :mod:`calls`."""
    (rows, columns), operands = output_shape(layout, *o[:3]), GemmArrays(*o[:3])
    if _is_apart(spec, o.dy.shape[1], columns, rows):
        dpostact = product(layout, jnp.promote_types(o.dy.dtype, jnp.float32), operands)
        return fallback.through_activation(dpostact, spec, bias_dtype, o)
    why = operands_refusal(operands, o.dy.dtype) or _scales_refusal(o.scales)
    arguments = layout, spec, bias_dtype
    kernel = partial(calls.linear_activation_backward, *arguments)
    return _run(why, kernel, partial(fallback.linear_activation_backward, *arguments), o)


def column_sums(dtype: DTypeLike, rows: Array, sizes: Array, scale: Array | None = None) -> Array:
    """The sums of the rows of each group, each row times its scale."""
    why = None if rows.dtype in _FLOATS and dtype in _FLOATS else f"needs rows of 16 or 32 bits, got {rows.dtype}"
    kernel, other = partial(calls.column_sums, dtype), partial(fallback.column_sums, dtype)
    return _run(why or _empty_refusal(rows), kernel, other, rows, sizes, scale)


def row_dots(rows: Array, vectors: Array, sizes: Array) -> Array:
    """The dot product of every row with the vector of its group, in at least float32."""
    why = None if rows.dtype in _FLOATS else f"needs rows of 16 or 32 bits, got {rows.dtype}"
    return _run(why or _empty_refusal(rows), calls.row_dots, fallback.row_dots, rows, vectors, sizes)


def operands_refusal(o: GemmArrays, dtype: DTypeLike) -> str | None:
    """The reason why no kernel multiplies these operands on any device, or None."""
    if o.a.dtype not in _SIXTEEN_BITS or o.b.dtype != o.a.dtype:
        return f"needs bfloat16 or float16 operands, got {o.a.dtype} and {o.b.dtype}"
    if dtype not in (o.a.dtype, np.dtype(np.float32)):
        return f"gives {o.a.dtype} or float32, not {np.dtype(dtype)}"
    if not 1 <= o.sizes.shape[0] <= MAX_GROUPS:
        return f"takes 1 to {MAX_GROUPS} groups, got {o.sizes.shape[0]}"
    if o.a.shape[0] > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows, got {o.a.shape[0]}"
    if o.bias is not None and o.bias.dtype not in _FLOATS:
        return f"needs a bias of 16 or 32 bits, got {o.bias.dtype}"
    return None


def _scales_refusal(scales: Array | None) -> str | None:
    return None if scales is None or scales.dtype in _FLOATS else f"needs probs of 16 or 32 bits, got {scales.dtype}"


def _empty_refusal(rows: Array) -> str | None:
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


def _run(
    why: str | None,
    kernel: Callable[..., R],
    other: Callable[..., R],
    *operands: GemmArrays | BackwardOperands | Array | None,
) -> R:
    """Runs the kernel on GPUs unless it is refused, and jax elsewhere. ``vmap`` runs the calls one after another."""
    arrays, structure = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(structure, vary_alike(*arrays))
    default: Callable[..., R] = jax.custom_batching.sequential_vmap(other)
    why = device_refusal() or why
    if why is None:
        results: R = jax.lax.platform_dependent(*operands, default=default, **{extension.kernels().platform: kernel})
        return results
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


# ---- a report on what runs in this process, and why

VERIFIED = "on an H200 under jax 0.11.2 (2026-11-23, commit 4c1d1b4), and on CPUs by the sources of the kernels"
"""Where the tests of the custom calls have passed."""


def info() -> dict[str, object]:
    """Reports versions, the devices that jax sees, and the reason if jax's own products run.

    Returns:
        ``jax``; ``ffi_api``, jaxlib's version of XLA's foreign function interface; ``handlers_api``, the version of our
        handlers, None if they cannot be used; ``targets``, their names in compiled programs; ``devices``;
        ``fallback``, the reason why ``jax.lax.ragged_dot`` runs, or None where kernels do; ``verified``, where the
        custom calls have been tested.
    """
    usable = extension.unavailable() is None
    return {
        "jax": jax.__version__,
        "ffi_api": str(extension.jaxlib_version()),
        "handlers_api": str(extension.Version(*extension.kernels().library.XLA_FFI_API)) if usable else None,
        "targets": targets() if usable else [],
        "devices": [str(device.device_kind) for device in jax.devices()],
        "fallback": device_refusal(),
        "verified": VERIFIED,
    }


def targets() -> list[str]:
    """The names of our custom calls in compiled programs; ``jax.export`` asks for them."""
    kernels = extension.kernels()
    return [kernels.target(name) for name in kernels.library.xla_handlers()]
