"""Splitting of a program's input columns: one argument, or the halves gate and up."""

from __future__ import annotations

from torch import Tensor


def split(columns: Tensor, count: int, block: int | None) -> tuple[Tensor, ...]:
    """The ``count`` arguments in [..., C], as views [..., blocks, block]; one block each if ``block`` is None."""
    width = block or columns.shape[-1] // count
    blocks = columns.shape[-1] // max(1, count * width)
    return columns.reshape(*columns.shape[:-1], blocks, count, width).unbind(-2)


def join(arguments: tuple[Tensor, ...], columns: Tensor) -> Tensor:
    """The inverse of :func:`split`, written into ``columns``, and rounded to its dtype."""
    block = arguments[0].shape[-1]
    for part, argument in zip(split(columns, len(arguments), block), arguments, strict=True):
        part.copy_(argument)
    return columns
