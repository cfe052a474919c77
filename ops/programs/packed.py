"""Reads functions of packed columns (gate and up in one tensor) as programs, and detects their layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser.contract.torch_private import without_dispatch_modes
from .program import Program
from .tracing import Function, NotPointwiseError, name_of, trace

_VIEWS = frozenset(
    {"__getitem__", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "view", "reshape", "unflatten"}
)
_OF_ALL_COLUMNS = frozenset({"contiguous", "float", "to"})  # what changes no number, in float32
_SHAPES = frozenset({"__get__", "size", "dim", "numel"})
_BLOCKS = (None, 1)


class PackedProgram(NamedTuple):
    """A program of gate and up, and the block size in which their columns alternate; None for one block each."""

    program: Program
    block: int | None


def trace_packed(function: Function) -> PackedProgram:
    """Traces a function of rows [T, 2 F] that splits the columns into two halves itself.

    Raises:
        UnknownFunctionError: an operation that kernels do not know.
        NotPointwiseError: an element depends on more than one number of each half, or the halves fit no layout.
    """
    packed = _Packed(function)
    program = trace(packed, ("x", "u"))
    if len(packed.blocks) != 1:
        raise NotPointwiseError(f"{name_of(function)}: does not take its columns in two halves of one layout")
    return PackedProgram(program, packed.blocks.pop())


class _Packed:
    """The function in terms of two halves. ``blocks``: the layouts in which it has split them."""

    def __init__(self, function: Function) -> None:
        self.__wrapped__, self.__name__, self.blocks = function, name_of(function), set[int | None]()

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        with without_dispatch_modes():
            numbers = torch.arange(2 * gate.numel(), device="cpu").view(gate.shape[0], -1)
        return self.__wrapped__(_columns(numbers, _GateAndUp(self, numbers, gate, up)))


class _GateAndUp(NamedTuple):
    """How a view splits columns into gate and up. ``numbers``: the element numbers of all columns."""

    packed: _Packed
    numbers: Tensor
    gate: Tensor
    up: Tensor

    def of(self, view: object) -> object:
        """The half that a view shows, or the view itself."""
        if not isinstance(view, Tensor):
            return self.gate.dtype if isinstance(view, torch.dtype) else view
        if view.shape == self.gate.shape:
            for block in _BLOCKS:
                blocks = self.numbers.view(*view.shape[:-1], -1, 2, block or view.shape[-1])
                for i, columns in enumerate((self.gate, self.up)):
                    if torch.equal(view, blocks.select(-2, i).reshape(view.shape)):
                        self.packed.blocks.add(block)
                        return columns
        return _columns(view, self)


class _Columns(Tensor):
    """A stand-in for the columns while the function splits them; it holds the numbers of the elements."""

    gate_and_up: _GateAndUp

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        columns, name = args[0] if args else None, func.__name__
        if not isinstance(columns, cls) or name not in _VIEWS | _OF_ALL_COLUMNS | _SHAPES:
            raise NotPointwiseError(f"calls {name} on gate and up together")
        if name in _OF_ALL_COLUMNS:
            return columns
        with without_dispatch_modes(), torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
                return type(result)([columns.gate_and_up.of(view) for view in result])
            return columns.gate_and_up.of(result)


def _columns(numbers: Tensor, gate_and_up: _GateAndUp) -> Tensor:
    with without_dispatch_modes(), torch._C.DisableTorchFunctionSubclass():
        columns = numbers.as_subclass(_Columns)
    columns.gate_and_up = gate_and_up
    return columns
