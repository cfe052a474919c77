"""Names of jax that moved between versions, in one file."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import jax


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes along which at least one of the arrays varies inside ``shard_map``; empty elsewhere."""
    return reduce(or_, (_varying(jax.typeof(array)) for array in arrays), frozenset())


def _varying(of: Any) -> frozenset[str]:
    kind = getattr(of, "manual_axis_type", None)
    axes: Any = getattr(of, "vma", frozenset()) if kind is None else kind.varying
    return frozenset(axes)


def vary(array: Any, axes: frozenset[str]) -> Any:
    """Marks the array as varying along these axes. The gradient of a replicated array is then summed over them."""
    missing = tuple(sorted(axes - varying_axes(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Marks arrays as varying along the same axes; None stays None."""
    axes = varying_axes(*(array for array in arrays if array is not None))
    return tuple(None if array is None else vary(array, axes) for array in arrays)
