"""Tensors of all groups that are one tensor each: as one where they lie so, and as one input of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser.replay import stream_of
from ..fuser.trace import active, has_no_data, is_traced
from .backends.problem import Matrices, first

_requires_grad = attrgetter("requires_grad")


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one stacked tensor over their common storage; None if they do not lie one after the other."""
    first = tensors[0]
    if first.is_meta or not first.is_contiguous():
        return None
    base, step, storage = first.data_ptr(), first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    for i, t in enumerate(tensors):
        if t.data_ptr() != base + i * step or t.untyped_storage().data_ptr() != storage or t.dtype != first.dtype:
            return None
    return first.detach().as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


class _Values(NamedTuple):
    addresses: list[int]
    matrices: Matrices


class _Whole(NamedTuple):
    flags: list[bool]
    stream: int
    stand_ins: bool
    tensor: Tensor


class ExpertGroup:
    """Tensors of one shape, dtype and device. What was found of them is kept while it holds.

    Attributes:
        tensors: one a group. Another group object is needed where one of them is another object.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self._addresses: list[int] = []
        self._values: _Values | None = None
        self._whole: _Whole | None = None

    @cached_property
    def is_uniform(self) -> bool:
        """Whether they are of one shape, dtype and device indeed."""
        first = self.tensors[0]
        kind = first.shape, first.dtype, first.device
        return all([(t.shape, t.dtype, t.device) == kind for t in self.tensors])

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether these are the group's."""
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))

    def values(self) -> Matrices:
        """One stacked tensor [E, ...] if they lie so, else the tensors; neither copies nor takes part in autograd."""
        if is_traced(self.tensors[0]) or (active() and any(map(has_no_data, self.tensors))):
            return self.tensors
        addresses, known = list(map(Tensor.data_ptr, self.tensors)), self._values
        if known is not None and addresses == known.addresses and first(known.matrices).dtype == self.tensors[0].dtype:
            return known.matrices
        if addresses != self._addresses:  # other memory may be of another form
            self.__dict__.pop("is_uniform", None)
            self._addresses = addresses
        one = as_one(self.tensors)
        matrices: Matrices = self.tensors if one is None else one
        self._values = _Values(addresses, matrices) if type(one) is Tensor and not one.is_inference() else None
        return matrices

    def whole(self, stand_ins: bool) -> Tensor:
        """A tensor that stands for all of them in autograd: its gradient, stacked, is handed to each.

        It has their shape [E, ...] and no data, and is made once: hundreds of inputs would cost autograd more than the
        kernels cost. A stream has its own, as autograd runs its backward there.

        Args:
            stand_ins: gradients are only for those that have ``grad_added_to_main_grad``.
        """
        flags, known = list(map(_requires_grad, self.tensors)), self._whole
        stream = stream_of(self.tensors[0])
        if known is not None and (known.flags, known.stream, known.stand_ins) == (flags, stream, stand_ins):
            return known.tensor
        self._whole = known = None  # before the next is made, which would share its nodes
        with torch.enable_grad():  # a call that records may come after one that does not
            whole: Tensor = _Together.apply(stand_ins, *self.tensors)  # type: ignore[no-untyped-call]
        if type(whole) is Tensor and all(t.is_leaf for t in self.tensors) and not whole.is_inference():
            self._whole = _Whole(flags, stream, stand_ins, whole)
        return whole


class _Together(torch.autograd.Function):
    """Many parameters as one tensor without data. Keeps nothing, so that its backward can run any number of times."""

    @staticmethod
    def forward(ctx: Any, stand_ins: bool, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.takers = tensors if stand_ins else ()
        ctx.count = len(tensors)
        return tensors[0].new_empty(()).expand(len(tensors), *tensors[0].shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        parts: Sequence[Tensor | None] = [None] * ctx.count if gradient is None else gradient.unbind()
        if gradient is not None and ctx.takers:
            takes = [getattr(t, "grad_added_to_main_grad", None) is not None for t in ctx.takers]
            parts = [part if taken else None for part, taken in zip(parts, takes, strict=True)]
        return None, *parts
