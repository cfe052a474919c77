"""Memory that callers lend to ops; a buffer must not overlap anything else that the call reads or writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..contract.errors import ArgumentError


@dataclass(frozen=True)
class CallerBuffer:
    """A buffer for the backward. It may change in between, so it is hidden from ``save_for_backward``."""

    tensor: Tensor


class NamedValue(NamedTuple):
    """A place in the list of a call's values, and its name in errors."""

    name: str
    slot: int


SlotValues: TypeAlias = list[Any]
"""The values of a call, by slot: tensors, and the other arguments of its ops and modules."""

Memory: TypeAlias = tuple[int, int, Tensor]  # the addresses of the first and the last byte, and whose they are


def check_overlaps(
    buffers: Sequence[NamedValue], inputs: Sequence[NamedValue], values: SlotValues, parameters: Iterable[Tensor]
) -> None:
    """Raises :class:`ArgumentError` if a buffer shares memory with an input, a parameter or another buffer."""
    written = [(each.name, _memory_of(values[each.slot])) for each in buffers]
    read = [(each.name, _memory_of(values[each.slot])) for each in inputs]
    read += [("a parameter", _memory_of(p)) for p in parameters]
    for i, (buffer, memory) in enumerate(written):
        for name, other in [*written[:i], *read]:
            if _meet(memory, other):
                raise ArgumentError(f"{buffer} overlaps {name} in memory; give a buffer of its own")


def overlap(a: object, b: object) -> bool:
    """Whether two tensors share a byte, judged by the first and last byte that each can reach."""
    return _meet(_memory_of(a), _memory_of(b))


def _memory_of(value: object) -> Memory | None:
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


# ---- modules that are not ops, and write into their input beside extra outputs that share its memory


def works_in_place(module: nn.Module) -> bool:
    """Whether the module, or one inside it, has ``inplace`` set, as torch's modules do."""
    return any(getattr(inner, "inplace", False) is True for inner in module.modules())


def run_beside(module: nn.Module, label: str, x: Tensor, extras: Sequence[NamedValue], values: SlotValues) -> object:
    """Runs a non-op module on ``x``; extra outputs that are read later keep their values.

    Raises:
        RuntimeError: it has written into memory that one of them shares, but does not have ``inplace`` set.
    """
    shared = [extra.name for extra in extras if overlap(values[extra.slot], x)]
    if not shared:
        return module(x)
    if works_in_place(module):
        return module(x.clone())
    before = None if x.is_inference() else x._version  # tensors of inference mode have none
    y = module(x)
    if before is not None and x._version != before:
        raise RuntimeError(
            f"{label} has modified its input in place, which is also the extra output {shared[0]!r} of an earlier op; "
            "let it write elsewhere, or give it an attribute inplace = True, for which its input is copied"
        )
    return y
