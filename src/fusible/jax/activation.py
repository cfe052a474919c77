"""The activation between the linears of an expert, as numbers for the kernels and as jax functions."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .checks import ArgumentError

CURVES = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")  # in the order of `Curve` in csrc
_SLOPES = {"quick_gelu": ("silu", 1.702)}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")
_NARROW = (1, 2, 4)  # blocks that kernels tell apart within sixteen columns
_TILE = 256  # columns of the widest tile: a block of gate and as much of up must fit in


class KernelActivation(NamedTuple):
    """``act(gate) * (up + linear_offset)`` if gated, ``act(x)`` if not.

    Attributes:
        curve: one of :data:`CURVES`.
        alpha: the slope inside silu.
        limit: gate is clamped to at most this, up to within plus and minus this; infinity for no limit.
        block: columns of gate before as many of up; None: two halves.
    """

    curve: str
    gated: bool
    alpha: float
    limit: float
    linear_offset: float
    block: int | None

    def columns(self, preact_columns: int) -> int:
        """The number of columns of the hidden rows."""
        return preact_columns // 2 if self.gated else preact_columns

    def attributes(self, columns: int) -> dict[str, object]:
        """The attributes that the XLA handlers take, for hidden rows with this number of columns."""
        return {
            "curve": np.int64(CURVES.index(self.curve)),
            "gated": self.gated,
            "alpha": np.float32(self.alpha),
            "limit": np.float32(self.limit),
            "linear_offset": np.float32(self.linear_offset),
            "block": np.int64(self.block or columns),
        }

    def refusal(self, columns: int) -> str | None:
        """The reason why no kernel has this activation in its epilogue, or None."""
        block = self.block or columns
        if columns % 8:
            return f"needs hidden rows of a multiple of 8 columns, got {columns}"
        if self.gated and block not in (*_NARROW, columns) and (block % 8 or _TILE % (2 * block)):
            return f"has no tile for blocks of {block} columns"
        return None


def activation(
    name: str, gated: bool, limit: float | None, alpha: float, linear_offset: float, interleave: int | None
) -> KernelActivation:
    """The activation of that name.

    Raises:
        ArgumentError: a parameter is invalid, or only valid for a gated activation.
    """
    if name not in ACTIVATIONS:
        raise ArgumentError(f"grouped_mlp: activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}")
    if alpha != 1.0 and name != "silu":
        raise ArgumentError(f"grouped_mlp: alpha is the slope inside silu, which {name!r} does not have; got {alpha}")
    if limit is not None and not limit > 0:
        raise ArgumentError(f"grouped_mlp: limit must be positive or None; got {limit}")
    if interleave is not None and (isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1):
        raise ArgumentError(f"grouped_mlp: interleave must be a positive int or None; got {interleave!r}")
    if not gated and (limit is not None or alpha != 1.0 or linear_offset != 0.0 or interleave is not None):
        raise ArgumentError("grouped_mlp: limit, alpha, linear_offset and interleave need gated=True")
    curve, slope = _SLOPES.get(name, (name, alpha))
    return KernelActivation(curve, gated, slope, math.inf if limit is None else limit, linear_offset, interleave)


def activate(preact: Array, spec: KernelActivation) -> Array:
    """Applies the activation to rows [T, C], in at least float32; returns [T, F]."""
    wide = preact.astype(jnp.promote_types(preact.dtype, jnp.float32))
    if not spec.gated:
        return _curve(wide, spec)
    rows, columns = wide.shape[0], spec.columns(wide.shape[1])
    block = spec.block or columns
    pairs = wide.reshape(rows, columns // block, 2, block)
    gate, up = (pairs[:, :, side].reshape(rows, columns) for side in (0, 1))
    if spec.limit != math.inf:  # clamped values have no gradient, NaN passes
        gate = jnp.where(gate > spec.limit, spec.limit, gate)
        up = jnp.where(jnp.abs(up) > spec.limit, jnp.sign(up) * spec.limit, up)
    return _curve(gate, spec) * (up + spec.linear_offset)


def _curve(x: Array, spec: KernelActivation) -> Array:
    match spec.curve:
        case "silu":
            return x * jax.nn.sigmoid(x * spec.alpha)
        case "gelu" | "gelu_tanh":
            return jax.nn.gelu(x, approximate=spec.curve == "gelu_tanh")
        case "relu":
            return jax.nn.relu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case _:
            return jax.nn.sigmoid(x)
