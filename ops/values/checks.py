"""Argument checks that ops share; errors name the expected and the given value, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from numbers import Real
from typing import SupportsIndex

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError, TensorSpec
from ...fuser.contract.config import active_config
from ...fuser.contract.spec import layout_of, not_dense
from ...fuser.contract.stored_values import check_parameter_stores_values
from ...fuser.contract.tracing import has_no_data

_INDEX_TYPES = (torch.int32, torch.int64)
_TEXT = (str, bytes, bytearray)  # sequences, the last two of ints


def check_sizes(op: str, dtype: torch.dtype | None, **sizes: object) -> None:
    """Checks arguments of a constructor: sizes from 1 on, and a floating-point dtype of at least 16 bits or None."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | SupportsIndex):  # int: no protocol is asked
            raise ArgumentError(f"{op}: {name} must be an int, got {size!r}")
        if size < 1:  # type: ignore[operator]
            raise ArgumentError(f"{op}: {name} must be at least 1, got {size}")
    is_dtype = isinstance(dtype, torch.dtype)
    if dtype is not None and not (is_dtype and dtype.is_floating_point and dtype.itemsize > 1):
        raise ArgumentError(f"{op}: dtype must be a floating-point dtype of at least 16 bits, got {dtype}")


def check_numbers(op: str, **numbers: object) -> None:
    """Checks factors in a constructor: finite numbers."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, float | Real) or not isfinite(number):
            raise ArgumentError(f"{op}: {name} must be a finite number, got {number!r}")


def check_switches(op: str, **switches: object) -> None:
    """Checks arguments that are on or off: a tensor given to one would only switch it on."""
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ArgumentError(f"{op}: {name} must be True or False, got {switch!r}")


def check_split_sizes(split_sizes: object, groups: int, x: TensorSpec | None) -> None:
    """Checks sizes: int32 or int64 [groups], on the device of ``x`` or the host; values only if that needs no sync.

    Without ``x``, the number of rows is not checked.
    """
    if isinstance(split_sizes, Tensor):
        _check_split_tensor(split_sizes, groups, x)
        if is_free_to_read(split_sizes):
            _check_values(split_sizes.tolist(), x)
    elif isinstance(split_sizes, Sequence) and type(split_sizes) not in _TEXT and _are_ints(split_sizes):
        if len(split_sizes) != groups:
            raise ArgumentError(f"split_sizes: expected {groups} sizes, one a group, got {len(split_sizes)}")
        _check_values(split_sizes, x)
    else:
        raise ArgumentError(
            f"split_sizes: expected an int32 or int64 tensor or a list of ints, got {_listed(split_sizes)}"
        )


def check_buffer(name: str, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Checks a buffer of the caller: exact shape, dtype and device, contiguous, without grad."""
    _check_is_tensor(name, buffer)
    if tuple(buffer.shape) != shape:
        raise ArgumentError(f"{name}: expected shape {list(shape)}, got {list(buffer.shape)}")
    if buffer.dtype != dtype:
        raise ArgumentError(f"{name}: expected dtype {dtype}, got {buffer.dtype}")
    if buffer.device != device:
        raise ArgumentError(f"{name}: expected a buffer on {device}, got one on {buffer.device}")
    _check_is_writable(name, buffer)


def check_buffer_columns(name: str, buffer: Tensor, columns: int) -> None:
    """:func:`check_buffer` while rows, dtype and device are still unknown."""
    _check_is_tensor(name, buffer)
    if not buffer.dim() or buffer.shape[-1] != columns:
        raise ArgumentError(f"{name}: expected {columns} columns, got shape {list(buffer.shape)}")
    if not buffer.is_floating_point():
        raise ArgumentError(f"{name}: expected a floating-point buffer, got {buffer.dtype}")
    _check_is_writable(name, buffer)


def _check_is_tensor(name: str, buffer: Tensor) -> None:
    if not isinstance(buffer, Tensor):
        raise ArgumentError(f"{name}: expected a tensor to write into, got {_kind(buffer)}")
    if not is_dense(buffer):
        raise not_dense(name, layout_of(buffer))


def _check_is_writable(name: str, buffer: Tensor) -> None:
    """Checks that a kernel may write the buffer: contiguous, without autograd, not made in inference mode."""
    if not buffer.is_contiguous():
        raise ArgumentError(f"{name}: expected a contiguous buffer, got strides {list(buffer.stride())}")
    if buffer.requires_grad:
        raise ArgumentError(f"{name}: requires grad; give buffer.detach(), which is the same memory")
    if not is_free_to_write(buffer):
        raise ArgumentError(
            f"{name}: was made under torch.inference_mode(), and cannot be written outside of it; give buffer.clone()"
        )


def check_rows(name: str, column: Tensor, x: TensorSpec | None) -> None:
    """Checks for a floating-point number of at least 16 bits for every row of ``x``, as far as its shape is known."""
    is_tensor = isinstance(column, Tensor)
    if is_tensor and not is_dense(column):
        raise not_dense(name, layout_of(column))
    if not is_tensor or not column.dtype.is_floating_point or column.itemsize == 1:
        shape = "with a number for every row of x" if x is None else f"of shape {list(x.shape[:-1])}"
        raise ArgumentError(f"{name}: expected a floating-point tensor {shape}, got {_kind(column)}")
    if x is None:
        return
    if column.shape != x.shape[:-1]:
        raise ArgumentError(f"{name}: expected shape {list(x.shape[:-1])}, one number a row, got {list(column.shape)}")
    if column.device != x.device:
        raise ArgumentError(f"{name}: expected a tensor on {x.device}, where x is, got one on {column.device}")


def check_halves(x: TensorSpec, block: int | None) -> None:
    """Checks that the columns of ``x`` are half gate and half up, in blocks of ``block`` if they alternate."""
    if x.shape[-1] % (2 * (block or 1)):
        form = f" blocks of {block} columns" if block else " halves"
        raise ArgumentError(f"x: expected gate and up{form} in the last dimension, got shape {list(x.shape)}")


def check_floats(x: TensorSpec) -> None:
    """Checks that ``x`` holds rows of floating-point numbers; silent rounding to integers must not happen."""
    if not x.dtype.is_floating_point:
        raise ArgumentError(f"x: expected a floating-point tensor, got {x.dtype}")
    if x.dtype.itemsize == 1:
        raise ArgumentError(f"x: expected a floating-point tensor of at least 16 bits, got {x.dtype}")
    if not x.shape:
        raise ArgumentError("x: expected at least 1 dimension, got a single number")


def check_features(x: TensorSpec, features: int) -> None:
    """Checks that ``x`` has that many columns."""
    if not x.shape or x.shape[-1] != features:
        raise ArgumentError(f"x: expected {features} features in the last dimension, got shape {list(x.shape)}")


def check_parameter(
    name: str, parameter: Tensor, shape: tuple[int, ...], device: torch.device | None, is_quantized: bool = False
) -> None:
    """Checks everything that makes a parameter's address safe to read, as a user may have replaced it.

    ``device`` is that of ``x``, or None while unknown. A parameter that ``is_quantized`` has 8-bit elements.

    It runs on the host at every call, so it reads attributes and calls nothing.
    """
    if type(parameter) is not nn.Parameter:  # as most are
        check_parameter_stores_values(name, parameter)
    if parameter.layout is not torch.strided or parameter.is_nested:  # is_dense, written out
        raise not_dense(name, layout_of(parameter))
    if parameter.shape != shape:
        raise ArgumentError(
            f"{name}: expected a parameter of shape {list(shape)}, got {list(parameter.shape)}; "
            "to change sizes, build another op"
        )
    if device is not None and parameter.device != device:
        raise ArgumentError(
            f"{name}: expected a parameter on {device}, where x is, got one on {parameter.device}; "
            f"move all of the op, op.to({str(device)!r})"
        )
    dtype = parameter.dtype
    if is_quantized:
        if dtype.itemsize != 1 or parameter.requires_grad:  # which format: its recipe checks that
            raise ArgumentError(
                f"{name}: expected a frozen parameter of 8 bits, as it was quantised, got {dtype}; "
                "a cast of the module also casts it, so quantise after the cast"
            )
        return
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise ArgumentError(f"{name}: expected a floating-point parameter of at least 16 bits, got {dtype}")


def check_matrix_input(
    x: TensorSpec, weight: Tensor, features: int, autocast_dtype: torch.dtype | None, *, dims: int = 2
) -> torch.dtype:
    """Checks that ``x`` fits the weight and has at least ``dims`` dimensions; returns the dtype of the product."""
    if len(x.shape) < dims == 2:
        raise ArgumentError(f"x: expected at least 2 dimensions, rows and features, got shape {list(x.shape)}")
    check_features(x, features)
    if x.device != weight.device:
        raise ArgumentError(f"x: expected a tensor on {weight.device}, where the weight is, got one on {x.device}")
    dtype = product_dtype(x.dtype, autocast_dtype)
    if dtype == autocast_dtype:
        return dtype
    if x.dtype != weight.dtype:
        raise ArgumentError(
            f"x: expected {weight.dtype}, the dtype of the weight, got {x.dtype}; cast one, or use autocast"
        )
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
        raise ArgumentError(f"x: expected a floating-point tensor of at least 16 bits, got {x.dtype}, as the weight is")
    return x.dtype


def check_quantized_input(
    x: TensorSpec,
    weight: Tensor,
    features: int,
    autocast_dtype: torch.dtype | None,
    refusal: Callable[[torch.dtype], str | None],
) -> torch.dtype:
    """:func:`check_matrix_input` for a quantised weight, whose recipe may refuse a dtype of rows."""
    dtype = _check_stored_input(x, weight, features, autocast_dtype)
    if (why := refusal(dtype)) is not None:
        raise ArgumentError(f"x: the weight is quantised, and {why}; cast it")
    return dtype


def check_decoded_input(
    x: TensorSpec, weight: Tensor, features: int, autocast_dtype: torch.dtype | None
) -> torch.dtype:
    """:func:`check_matrix_input` for a weight that is decoded to the dtype of the rows, which has float32's range."""
    dtype = _check_stored_input(x, weight, features, autocast_dtype)
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ArgumentError(f"x: expected bfloat16 or float32, to which the weight is decoded, got {dtype}; cast it")
    return dtype


def _check_stored_input(
    x: TensorSpec, weight: Tensor, features: int, autocast_dtype: torch.dtype | None
) -> torch.dtype:
    """Checks that ``x`` fits a weight that is stored in 8 or 4 bits; returns the dtype of the product."""
    if len(x.shape) < 2:
        raise ArgumentError(f"x: expected at least 2 dimensions, rows and features, got shape {list(x.shape)}")
    check_features(x, features)
    if x.device != weight.device:
        raise ArgumentError(f"x: expected a tensor on {weight.device}, where the weight is, got one on {x.device}")
    return product_dtype(x.dtype, autocast_dtype)


def is_dense(tensor: Tensor) -> bool:
    """Whether all values have one address: the tensor is not sparse, nested or in a library's own format."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_free_to_read(tensor: Tensor) -> bool:
    """Whether values can be checked: they are on the host, or ``config(debug=True)`` allows to wait for them."""
    if tensor.is_meta or has_no_data(tensor):
        return False
    return tensor.device.type == "cpu" or active_config().debug


def is_free_to_write(tensor: Tensor) -> bool:
    """Whether the tensor may be written here; a tensor made in inference mode may only be written there."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


def is_narrow_float(dtype: torch.dtype) -> bool:
    """Whether elements have 8 bits, which only quantised products read; torch itself cannot add them."""
    return dtype.is_floating_point and dtype.itemsize == 1


def product_dtype(dtype: torch.dtype, autocast_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which an ``x`` of ``dtype`` is multiplied. Autocast leaves float64 alone, as torch's does."""
    if autocast_dtype is None or not dtype.is_floating_point or dtype == torch.float64:
        return dtype
    return autocast_dtype


def _are_ints(sizes: Sequence[object]) -> bool:
    return all(type(size) is int for size in sizes)


def _listed(sizes: object) -> str:
    """Describes the argument that came, and the first element of a list that is not an int."""
    if not isinstance(sizes, Sequence) or type(sizes) in _TEXT:
        return _kind(sizes) + ("; give torch.as_tensor(sizes)" if hasattr(sizes, "__array__") else "")
    wrong = next(type(size) for size in sizes if type(size) is not int)
    cure = "; give [int(n) for n in sizes]" if issubclass(wrong, SupportsIndex) else ""
    return f"{_kind(sizes)} with a {wrong.__module__}.{wrong.__name__}{cure}".replace("builtins.", "")


def _check_split_tensor(split_sizes: Tensor, groups: int, x: TensorSpec | None) -> None:
    if split_sizes.layout is not torch.strided or split_sizes.is_nested:  # is_dense, written out
        raise not_dense("split_sizes", layout_of(split_sizes))
    if split_sizes.dtype not in _INDEX_TYPES:
        raise ArgumentError(f"split_sizes: expected int32 or int64, got {split_sizes.dtype}")
    shape: tuple[object, ...] = tuple(split_sizes.shape)
    if shape and type(shape[0]) is torch.SymInt:  # only the data will tell: compiled code checks it then
        torch._check(shape[0] == groups, lambda: f"split_sizes: expected one size a group, {groups}")  # type: ignore[no-untyped-call]
        shape = (groups, *shape[1:])
    if shape != (groups,):
        raise ArgumentError(f"split_sizes: expected shape [{groups}], one size a group, got {list(split_sizes.shape)}")
    if x is not None and split_sizes.device != x.device and split_sizes.device.type != "cpu":
        raise ArgumentError(
            f"split_sizes: expected a tensor on {x.device}, where x is, got one on {split_sizes.device}"
        )


def _check_values(sizes: Sequence[int], x: TensorSpec | None) -> None:
    if sizes and min(sizes) < 0:
        raise ArgumentError(f"split_sizes: sizes must not be negative, got {min(sizes)}")
    if x is None:
        return
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    if sum(sizes) > rows:
        raise ArgumentError(f"split_sizes: they sum to {sum(sizes)}, but x has only {rows} rows")


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
