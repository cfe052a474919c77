"""Names of jax that moved between versions, in one file."""

from __future__ import annotations

from functools import reduce
from operator import or_

import jax
from jax import Array


def varying_axes(*arrays: Array | None) -> frozenset[str]:
    """The mesh axes along which at least one of the arrays varies inside ``shard_map``; empty elsewhere."""
    return reduce(or_, (_varying(jax.typeof(array)) for array in arrays), frozenset())


def _varying(of: jax.core.AbstractValue) -> frozenset[str]:
    kind = getattr(of, "manual_axis_type", None)
    axes = getattr(of, "vma", frozenset()) if kind is None else kind.varying
    return frozenset(axes)


def vary(array: Array, axes: frozenset[str]) -> Array:
    """Marks the array as varying along these axes. The gradient of a replicated array is then summed over them."""
    missing = tuple(sorted(axes - varying_axes(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def vary_alike(*arrays: Array | None) -> tuple[Array | None, ...]:
    """Marks arrays as varying along the same axes; None stays None."""
    axes = varying_axes(*(array for array in arrays if array is not None))
    return tuple(None if array is None else vary(array, axes) for array in arrays)
