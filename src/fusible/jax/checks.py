"""Checks of a call's arguments, while it is traced, and the errors: as ``fusible``'s, without importing torch."""

from __future__ import annotations

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType


class ArgumentError(TypeError, ValueError):
    """An invalid call: a wrong shape, dtype or keyword. Raised while the call is traced."""


class RefusedError(RuntimeError):
    """Raised under ``config(strict=True)`` if jax would run a call that the kernels refuse; the message says why."""


def check_array(function: str, name: str, array: Array, dimensions: int | None = None) -> None:
    """Checks for an array of real numbers with this number of dimensions."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ArgumentError(f"{function}: {name} must be an array, got a {type(array).__name__}")
    if dimensions is not None and array.ndim != dimensions:
        raise ArgumentError(f"{function}: {name} must have {dimensions} dimensions, got shape {list(array.shape)}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentError(f"{function}: {name} must hold real numbers, got {array.dtype}")
    if jnp.dtype(array.dtype).itemsize == 1:
        raise ArgumentError(f"{function}: {name} must hold numbers of at least 16 bits, got {array.dtype}")


def check_sizes(function: str, name: str, sizes: Array, groups: int | None = None) -> None:
    """Checks for one integer per group, on the device or not."""
    if not hasattr(sizes, "shape") or sizes.ndim != 1 or sizes.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        came = f"{sizes.dtype} {list(sizes.shape)}" if hasattr(sizes, "shape") else f"a {type(sizes).__name__}"
        raise ArgumentError(f"{function}: {name} must be an int32 or int64 array [G], got {came}")
    if groups is not None and sizes.shape[0] != groups:
        raise ArgumentError(f"{function}: {name} must have a size for each of {groups} groups, got {sizes.shape[0]}")


def check_shape(function: str, name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Checks that an operand has the shape that the others imply."""
    check_array(function, name, array)
    if tuple(array.shape) != shape:
        raise ArgumentError(f"{function}: {name} must be {list(shape)}, got shape {list(array.shape)}")


def check_one_dtype(function: str, **arrays: Array) -> None:
    """Checks that operands that are multiplied have one dtype."""
    dtypes = {name: array.dtype for name, array in arrays.items()}
    if len(set(dtypes.values())) > 1:
        came = ", ".join(f"{name} has {dtype}" for name, dtype in dtypes.items())
        raise ArgumentError(f"{function}: operands of one dtype expected; {came}")


def check_depths(function: str, names: tuple[str, str], depths: tuple[int, int]) -> None:
    """Checks that the contracted dims are equal."""
    if depths[0] != depths[1]:
        raise ArgumentError(
            f"{function}: contracts {depths[0]} of {names[0]} with {depths[1]} of {names[1]}; they must be equal"
        )


def check_sharding(function: str, *arrays: Array | None) -> None:
    """Checks that operands spread over devices are inside ``shard_map``.

    It raises for explicit mesh axes, which would need a sharding rule, and warns if XLA gathers the operands. Under
    ``jit``, tracing only knows explicit axes.
    """
    present = [array for array in arrays if array is not None]
    for array in present:
        mesh = jax.typeof(array).sharding.mesh
        axes = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit]
        if axes:
            raise ArgumentError(
                f"{function}: an operand is on a mesh with the explicit axes {', '.join(axes)}, for which there is "
                "no sharding rule; call it inside jax.shard_map, or in jax.sharding.auto_axes"
            )
    concrete = [array for array in present if isinstance(array, Array) and not isinstance(array, jax.core.Tracer)]
    if not all(array.sharding.is_fully_replicated for array in concrete):
        _warn_of_gathering(function)


@cache
def _warn_of_gathering(function: str) -> None:
    warnings.warn(
        f"fusible.jax: {function} has an operand that is sharded, outside of shard_map: XLA gathers all operands on "
        "every device; call it inside jax.shard_map",
        stacklevel=2,
    )
