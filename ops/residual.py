"""Branches: an extra output that a later op reads, and the op that adds it; and the op that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..fuser import ArgumentError, Grads, Keyword, Op, Outputs, Spec
from ..fuser.op import RESERVED

_TAKEN = ("x", "y", "dy", "self", "saved", "op_kwargs", *sorted(RESERVED))


class Identity(Op):
    """``y = x``."""

    def check(self, x: Spec) -> Spec:
        return x

    def fwd(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {"x": dy}


class MakeExtraOutput(Op):
    """Passes ``x`` on and also gives it out under a name: a later op's keyword of that name reads it.

    An extra output that no op reads is returned to the caller, after the main output.
    """

    def __init__(self, name: str = "extra") -> None:
        super().__init__()
        _check_name("MakeExtraOutput", name)
        self.extra_outputs = (name,)

    def check(self, x: Spec) -> Mapping[str, Spec]:
        return {"y": x, self.extra_outputs[0]: x}

    def fwd(self, x: Tensor) -> tuple[Outputs, None]:
        return {"y": x, self.extra_outputs[0]: x.detach()}, None

    def bwd(self, saved: Any, dy: Tensor, **extra: Tensor) -> Grads:
        return {"x": lambda: dy + extra[self.extra_outputs[0]]}

    def extra_repr(self) -> str:
        return repr(self.extra_outputs[0])


class AddExtraInput(Op):
    """``y = x + extra``: the keyword, of the name given, is a tensor like ``x``, from the caller or an earlier op."""

    def __init__(self, name: str = "extra") -> None:
        super().__init__()
        _check_name("AddExtraInput", name)
        self.keywords = {name: Keyword(required=True, tensor=True)}

    @property
    def name(self) -> str:
        """The keyword's name."""
        return next(iter(self.keywords))

    def check_without_x(self, **extra: Any) -> None:
        for name, tensor in extra.items():
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"{name}: expected a tensor like x, got a {type(tensor).__name__}")

    def check(self, x: Spec, **extra: Tensor) -> Spec:
        for name, tensor in extra.items():
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != x.shape:
                came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ArgumentError(f"{name}: expected a tensor of shape {list(x.shape)}, like x, got {came}")
            if tensor.device != x.device:
                raise ArgumentError(f"{name}: expected a tensor on {x.device}, where x is, got one on {tensor.device}")
            if not torch.can_cast(tensor.dtype, x.dtype):
                raise ArgumentError(f"{name}: {tensor.dtype} cannot be added to x, of {x.dtype}, as which it comes out")
        return x

    def fwd(self, x: Tensor, **extra: Tensor) -> tuple[Tensor, None]:
        return (x + extra[self.name]).to(x.dtype), None

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {"x": dy, self.name: dy}

    def extra_repr(self) -> str:
        return repr(self.name)


def _check_name(op: str, name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
        raise ValueError(f"{op}: the name must be an identifier other than {', '.join(_TAKEN)}; got {name!r}")
