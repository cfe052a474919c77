"""Memory that callers lend to ops; a buffer must not overlap anything else that the call reads or writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..contract.errors import ArgumentError


@dataclass(frozen=True)
class CallerBuffer:
    """A buffer for the backward. It may change in between, so it is hidden from ``save_for_backward``."""

    tensor: Tensor


class NamedValue(NamedTuple):
    """A place in the list of a call's values, and its name in errors."""

    name: str
    slot: int


Memory: TypeAlias = tuple[int, int, Tensor]  # the addresses of the first and the last byte, and whose they are


def check_overlaps(
    buffers: Sequence[NamedValue], inputs: Sequence[NamedValue], values: list[Any], parameters: Iterable[Tensor]
) -> None:
    """Raises :class:`ArgumentError` if a buffer shares memory with an input, a parameter or another buffer."""
    written = [(each.name, _memory_of(values[each.slot])) for each in buffers]
    read = [(each.name, _memory_of(values[each.slot])) for each in inputs]
    read += [("a parameter", _memory_of(p)) for p in parameters]
    for i, (buffer, memory) in enumerate(written):
        for name, other in [*written[:i], *read]:
            if _meet(memory, other):
                raise ArgumentError(f"{buffer} overlaps {name} in memory; give a buffer of its own")


def overlap(a: Any, b: Any) -> bool:
    """Whether two tensors share a byte, judged by the first and last byte that each can reach."""
    return _meet(_memory_of(a), _memory_of(b))


def _memory_of(value: Any) -> Memory | None:
    """The memory range of a tensor; None if it has no address (its op's check reports that)."""
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
        return None
    first, last = extent(value)
    return (first, last, value) if first else None


def _meet(a: Memory | None, b: Memory | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1] and a[2].device == b[2].device


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first and last byte; the last is before the first if it has no elements."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes - 1
    reach = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return first, first + (reach + 1) * tensor.element_size() - 1
