"""The operands of ``grouped_gemm``, and the shape of its output's data."""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex

from torch import Tensor

from ...fuser import ArgumentError
from ..kernels import Layout
from ..values.checks import is_free_to_read
from ..values.grouped_tensor import GroupedTensor

Factor = float | Tensor | None


class Product(NamedTuple):
    """The arguments of a call that are not differentiable: the operands' groups, layout and factor."""

    a: GroupedTensor
    b: GroupedTensor
    layout: Layout
    alpha: Factor
    shape: tuple[int, ...] = ()  # of the data of an output that is allocated here


def rows_of(product: Product) -> Tensor | int:
    return product.a.columns if product.layout is Layout.TN else product.a.rows


def columns_of(product: Product) -> Tensor | int:
    return product.b.rows if product.layout is Layout.NT else product.b.columns


def output_shape(product: Product) -> tuple[int | None, ...]:
    """The shape of the output's data, with None for sizes that only the device knows."""
    rows, columns = rows_of(product), columns_of(product)
    if isinstance(rows, int) and isinstance(columns, int):
        return product.a.num_groups, rows, columns
    if isinstance(columns, int):
        return _sum_of_rows(product.a, product.layout is Layout.TN), columns
    total = _sum_of_rows(product.b, product.layout is not Layout.NT)
    return (rows * total if isinstance(rows, int) and total is not None else None,)


def _sum_of_rows(t: GroupedTensor, transposed: bool) -> int | None:
    """Rows (or columns) of all groups and of the tail; None if only the device knows."""
    if not transposed:
        return t.data.shape[0] if t.last_dims is None else None
    rows = t.rows
    return t.data.shape[0] // rows if isinstance(rows, int) and rows else None


def fits(data: Tensor, shape: tuple[int | None, ...]) -> bool:
    """Whether an output has that shape; a size that only the device knows matches any."""
    sizes = tuple(data.shape)
    return len(sizes) == len(shape) and all(want in (None, size) for want, size in zip(shape, sizes, strict=True))


def in_words(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def shape_to_allocate(product: Product, elements: int | None) -> tuple[int, ...]:
    """The shape of the data to allocate for the output; waits for the device only if no other source knows it."""
    shape = output_shape(product)
    first, rest = shape[0], [size for size in shape[1:] if size is not None]
    if first is not None:
        if elements is not None:
            raise ArgumentError(
                f"grouped_gemm: out_elements is not needed here, the output has shape {in_words(shape)}"
            )
        return first, *rest
    if elements is None:
        return needed(product), *rest
    if not isinstance(elements, SupportsIndex) or elements < 0:
        raise ArgumentError(f"grouped_gemm: out_elements must be an int that is not negative, got {elements!r}")
    capacity = elements // max(1, *rest, 1)
    if is_counted_on_the_host(product) and needed(product) > capacity:
        least = needed(product) * max(1, *rest, 1)
        raise ArgumentError(f"grouped_gemm: out_elements must be at least {least}, got {elements}")
    return capacity, *rest


def needed(product: Product) -> int:
    """The rows of all groups of the output, or its elements if columns are ragged too. Waits for the device."""
    by_elements = isinstance(columns_of(product), Tensor)
    return sum(rows * columns if by_elements else rows for rows, columns in shapes(product))


def shapes(product: Product) -> list[tuple[int, int]]:
    """The shapes of the output's groups as Python ints, which do not overflow. Waits for the device."""
    rows, columns = (d.tolist() if isinstance(d, Tensor) else [d] * product.a.num_groups for d in dims(product))
    return list(zip(rows, columns, strict=True))


def is_counted_on_the_host(product: Product) -> bool:
    """Whether :func:`shapes` needs no wait."""
    return all(is_free_to_read(d) for d in dims(product) if isinstance(d, Tensor))


def dims(product: Product) -> tuple[Tensor | int, Tensor | int]:
    """Rows and columns of the output's groups."""
    return rows_of(product), columns_of(product)


def output(product: Product, data: Tensor) -> GroupedTensor:
    """The output's groups around its data."""
    rows, columns = rows_of(product), columns_of(product)
    first, last = (d if isinstance(d, Tensor) else None for d in (rows, columns))
    return GroupedTensor(data, first, last, rows=rows if first is None and last is not None else None)  # type: ignore[arg-type]
