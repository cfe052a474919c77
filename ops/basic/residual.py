"""Branches: an extra output that a later op reads, the ops that add it or go on with it, and the identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...fuser import ArgumentError, Grads, Keyword, Op, Outputs, Promises, TensorSpec
from ...fuser.contract.op import RESERVED
from ...fuser.contract.spec import layout_of, not_dense
from ..values.checks import is_dense, is_narrow_float
from .link import Link, linear_program

_TAKEN = ("x", "y", "dy", "self", "saved", "op_kwargs", *sorted(RESERVED))


class Identity(Op):
    """``y = x``, the tensor itself."""

    promises = Promises(passes_x_on=True)

    def check(self, x: TensorSpec) -> TensorSpec:
        return x

    def fwd(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {"x": dy}


class MakeExtraOutput(Op):
    """Passes ``x`` on, and also as an extra output with a name. A later op's keyword of that name reads it.

    The extra output shares the memory of ``x``. While it is still needed, a module with ``inplace=True`` gets a copy of
    that memory. Any other module that writes into its input then raises, except under ``torch.inference_mode()``, where
    this cannot be detected.

    Args:
        name: an identifier.
        output_to_caller: whether a container returns the extra output, after the main output. None: only if no op reads
            it.

    Raises:
        ValueError: a name that is not an identifier, or that is reserved.
        TypeError: ``output_to_caller`` is neither a bool nor None.
    """

    promises = Promises(passes_x_on=True)

    def __init__(self, name: str = "extra", *, output_to_caller: bool | None = None) -> None:
        super().__init__()
        _check_name("MakeExtraOutput", name)
        if output_to_caller is not None and not isinstance(output_to_caller, bool):
            kind = type(output_to_caller).__name__
            raise TypeError(f"MakeExtraOutput: output_to_caller must be True, False or None, got a {kind}")
        self.extra_outputs = (name,)
        self.output_to_caller = {} if output_to_caller is None else {name: output_to_caller}

    def check(self, x: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"y": x, self.extra_outputs[0]: x}

    def fwd(self, x: Tensor) -> tuple[Outputs, None]:
        return {"y": x, self.extra_outputs[0]: x.detach()}, None

    def bwd(self, saved: Any, dy: Tensor, **extra: Tensor) -> Grads:
        return {"x": lambda: dy + extra[self.extra_outputs[0]]}

    def extra_repr(self) -> str:
        returned = [f"output_to_caller={value}" for value in self.output_to_caller.values()]
        return ", ".join([repr(self.extra_outputs[0]), *returned])


class AddExtraInput(Op):
    """``y = x + extra``. The extra tensor, like ``x``, is the keyword ``name``: the caller's, or an earlier op's.

    It has the shape of ``x``, and a dtype that can be cast to the dtype of ``x``, which is also that of ``y``.
    """

    promises = Promises(replayable=True, values_checked=frozenset())

    def __init__(self, name: str = "extra") -> None:
        super().__init__()
        _check_name("AddExtraInput", name)
        self.keywords = {name: Keyword(required=True, tensor=True)}

    @property
    def name(self) -> str:
        """The name of the keyword."""
        return next(iter(self.keywords))

    @property
    def link(self) -> Link:
        """The op as a link of a chain."""
        return Link(linear_program(torch.add, "m0"), matrices=(self.name,))

    def check_without_x(self, **extra: Any) -> None:
        for name, tensor in extra.items():
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"{name}: expected a tensor like x, got a {type(tensor).__name__}")

    def check(self, x: TensorSpec, **extra: Tensor) -> TensorSpec:
        if is_narrow_float(x.dtype):
            raise ArgumentError(f"x: expected numbers that can be added, got {x.dtype}")
        for name, tensor in extra.items():
            if isinstance(tensor, Tensor) and not is_dense(tensor):
                raise not_dense(name, layout_of(tensor))
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != x.shape:
                came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ArgumentError(f"{name}: expected a tensor of shape {list(x.shape)}, like x, got {came}")
            if tensor.device != x.device:
                raise ArgumentError(f"{name}: expected a tensor on {x.device}, where x is, got one on {tensor.device}")
            if is_narrow_float(tensor.dtype) or not torch.can_cast(tensor.dtype, x.dtype):
                raise ArgumentError(f"{name}: {tensor.dtype} cannot be added to x, of {x.dtype}, the dtype of the sum")
        return x

    def fwd(self, x: Tensor, **extra: Tensor) -> tuple[Tensor, None]:
        return (x + extra[self.name]).to(x.dtype), None

    def bwd(self, saved: Any, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        return dict.fromkeys(needs_grad, dy)  # integers have no gradient

    def extra_repr(self) -> str:
        return repr(self.name)


class SwapExtra(Op):
    """``y = extra``, the keyword ``name``; ``x`` becomes the extra output ``output``, which a later op reads.

    So a second branch begins at a tensor of which an earlier op has made an extra output, such as the experts after a
    shared expert: both see the tokens. Both tensors may have any shape and dtype.

    Raises:
        ValueError: a name that is not an identifier, or that is reserved; twice the same name.
    """

    promises = Promises(values_checked=frozenset())

    def __init__(self, name: str, output: str) -> None:
        super().__init__()
        _check_name("SwapExtra", name)
        _check_name("SwapExtra", output)
        if name == output:
            raise ValueError(f"SwapExtra: the extra output needs another name than the keyword, got {name!r} twice")
        self.keywords = {name: Keyword(required=True, tensor=True)}
        self.extra_outputs = (output,)

    def check(self, x: TensorSpec, **extra: Tensor) -> Mapping[str, TensorSpec]:
        ((name, tensor),) = extra.items()
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{name}: expected a tensor, got a {type(tensor).__name__}")
        return {"y": TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device), self.extra_outputs[0]: x}

    def fwd(self, x: Tensor, **extra: Tensor) -> tuple[Outputs, None]:
        (tensor,) = extra.values()
        return {"y": tensor.view_as(tensor), self.extra_outputs[0]: x.view_as(x)}, None

    def bwd(self, saved: object, dy: Tensor, **extra: Tensor) -> Grads:
        return {next(iter(self.keywords)): dy, "x": extra[self.extra_outputs[0]]}

    def extra_repr(self) -> str:
        return f"{next(iter(self.keywords))!r}, {self.extra_outputs[0]!r}"


def _check_name(op: str, name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
        raise ValueError(f"{op}: the name must be an identifier other than {', '.join(_TAKEN)}; got {name!r}")
