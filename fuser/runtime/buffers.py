"""Memory that callers lend to ops: no buffer may overlap anything else that the call reads or writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..spec import layout_of


@dataclass(frozen=True)
class CallerBuffer:
    """A buffer on its way to the backward. It may change meanwhile, so it is hidden from ``save_for_backward``."""

    tensor: Tensor


class NamedValue(NamedTuple):
    """A place in the list of a call's values, and what errors call what stands there."""

    name: str
    slot: int


def check_overlaps(
    buffers: Sequence[NamedValue], inputs: Sequence[NamedValue], values: list[Any], parameters: Iterable[Tensor]
) -> None:
    """Raises :class:`ArgumentError` where a buffer shares memory with an input, a parameter or another buffer."""
    read = [(each.name, values[each.slot]) for each in inputs if isinstance(values[each.slot], Tensor)]
    read += [("a parameter", p) for p in parameters]
    for i, buffer in enumerate(buffers):
        others = [(other.name, values[other.slot]) for other in buffers[:i]] + read
        for name, other in others:
            if overlap(values[buffer.slot], other):
                raise ArgumentError(f"{buffer.name} overlaps {name} in memory; give a buffer of its own")


def overlap(a: Any, b: Any) -> bool:
    """Whether two tensors have a byte in common, judged by the first and last that each can reach."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False  # the op's own check says what is wrong with it
    if {layout_of(a), layout_of(b)} != {torch.strided}:
        return False  # it has no memory of its own that an address could tell
    if a.device != b.device or not a.numel() or not b.numel() or a.device.type == "meta":
        return False
    (a_first, a_last), (b_first, b_last) = extent(a), extent(b)
    return a_first <= b_last and b_first <= a_last


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first and the last byte of a tensor; the last is before the first if it has no elements."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes - 1
    reach = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return first, first + (reach + 1) * tensor.element_size() - 1
