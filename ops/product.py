"""What ``grouped_gemm`` multiplies, and which shape the data of its output have."""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex

from torch import Tensor

from ..fuser import ArgumentError
from .checks import is_free_to_read
from .grouped_tensor import GroupedTensor
from .kernels import Layout

Factor = float | Tensor | None


class Product(NamedTuple):
    """What of a call is no differentiable tensor: the operands' groups, and how to multiply them."""

    a: GroupedTensor
    b: GroupedTensor
    layout: Layout
    alpha: Factor
    shape: tuple[int, ...] = ()  # of the data of an output that is allocated here


def rows_of(how: Product) -> Tensor | int:
    return how.a.columns if how.layout is Layout.TN else how.a.rows


def columns_of(how: Product) -> Tensor | int:
    return how.b.rows if how.layout is Layout.NT else how.b.columns


def output_shape(how: Product) -> tuple[int | None, ...]:
    """The shape of the output's data, as far as the operands' shapes say; None is for the device to say."""
    rows, columns = rows_of(how), columns_of(how)
    if isinstance(rows, int) and isinstance(columns, int):
        return how.a.num_groups, rows, columns
    if isinstance(columns, int):
        return _sum_of_rows(how.a, how.layout is Layout.TN), columns
    total = _sum_of_rows(how.b, how.layout is not Layout.NT)
    return (rows * total if isinstance(rows, int) and total is not None else None,)


def _sum_of_rows(t: GroupedTensor, transposed: bool) -> int | None:
    """Rows (or columns) of all groups together, and of what lies behind them; None: the device alone knows."""
    if not transposed:
        return t.data.shape[0] if t.last_dims is None else None
    rows = t.rows
    return t.data.shape[0] // rows if isinstance(rows, int) and rows else None


def fits(data: Tensor, shape: tuple[int | None, ...]) -> bool:
    """Whether an output has that shape; where the device alone knows a size, any will do."""
    sizes = tuple(data.shape)
    return len(sizes) == len(shape) and all(want in (None, size) for want, size in zip(shape, sizes, strict=True))


def in_words(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def room_for(how: Product, elements: int | None) -> tuple[int, ...]:
    """The shape of the data to allocate for the output; waits for the device only if nothing else says it."""
    shape = output_shape(how)
    first, rest = shape[0], [size for size in shape[1:] if size is not None]
    if first is not None:
        if elements is not None:
            raise ArgumentError(
                f"grouped_gemm: out_elements is not needed here, the output has shape {in_words(shape)}"
            )
        return first, *rest
    if elements is None:
        return needed(how), *rest
    if not isinstance(elements, SupportsIndex) or elements < 0:
        raise ArgumentError(f"grouped_gemm: out_elements must be an int that is not negative, got {elements!r}")
    room = elements // max(1, *rest, 1)
    if is_counted_on_the_host(how) and needed(how) > room:
        least = needed(how) * max(1, *rest, 1)
        raise ArgumentError(f"grouped_gemm: out_elements must be at least {least}, got {elements}")
    return room, *rest


def needed(how: Product) -> int:
    """The rows of all groups of the output, or its elements where columns are ragged too. Waits for the device."""
    by_elements = isinstance(columns_of(how), Tensor)
    return sum(rows * columns if by_elements else rows for rows, columns in shapes(how))


def shapes(how: Product) -> list[tuple[int, int]]:
    """Of the output's groups, in numbers of Python, whose products and sums do not wrap. Waits for the device."""
    rows, columns = (d.tolist() if isinstance(d, Tensor) else [d] * how.a.num_groups for d in dims(how))
    return list(zip(rows, columns, strict=True))


def is_counted_on_the_host(how: Product) -> bool:
    """Whether :func:`shapes` costs no wait."""
    return all(is_free_to_read(d) for d in dims(how) if isinstance(d, Tensor))


def dims(how: Product) -> tuple[Tensor | int, Tensor | int]:
    """Rows and columns of the output's groups."""
    return rows_of(how), columns_of(how)


def output(how: Product, data: Tensor) -> GroupedTensor:
    """The output's groups around its data."""
    rows, columns = rows_of(how), columns_of(how)
    first, last = (d if isinstance(d, Tensor) else None for d in (rows, columns))
    return GroupedTensor(data, first, last, rows=rows if first is None and last is not None else None)  # type: ignore[arg-type]
