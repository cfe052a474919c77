"""The tensors of all groups: one stacked tensor if memory allows, and one input of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...fuser.contract.torch_private import implementation_of, run_when_ready, tensor_guards
from ...fuser.contract.tracing import active, has_no_data, is_traced
from ...fuser.runtime.devices import stream_of
from ..kernels import addresses_of
from ..kernels.problems.gemm import Matrices

_MANY_FORMS = 8  # a step has three or four: recording or not, with autocast or without


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """One stacked tensor over the common storage of the tensors; None if they are not contiguous in it."""
    first = tensors[0]
    if first.is_meta:
        return None
    base, step, storage = first.data_ptr(), first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    for i, t in enumerate(tensors):
        if t.data_ptr() != base + i * step or t.untyped_storage().data_ptr() != storage:
            return None
        if t.shape != first.shape or t.dtype != first.dtype or not t.is_contiguous():
            return None
    return first.detach().as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def _unknown(*tensors: Tensor) -> bool:
    return False


class _Values(NamedTuple):
    addresses: list[int] | bytes
    matrices: Matrices


class _Form:
    """Facts about tensors of one form: types, dtypes, devices, shapes, strides, gradients, dispatch modes.

    Attributes:
        is_uniform: whether all have the same shape, dtype and device.
        matches: whether tensors have this form; :func:`_unknown` if torch cannot tell, so that nothing is cached.
        values: the values at these addresses: stacked or separate.
    """

    __slots__ = ("is_uniform", "matches", "values")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        first = tensors[0]
        kind = first.shape, first.dtype, first.device
        self.is_uniform = all([(t.shape, t.dtype, t.device) == kind for t in tensors])
        self.values: _Values | None = None
        self.matches: Callable[..., bool] = _unknown
        # torch's guards do not see the state of a class with a dispatch of its own
        if all([cls.__torch_dispatch__ is Tensor.__torch_dispatch__ for cls in {type(t) for t in tensors}]):
            self.matches = tensor_guards(tensors)


class _Whole(NamedTuple):
    """The tensor that represents a group's in autograd, with the facts that it holds for.

    Attributes:
        implementations: of the group's tensors; ``torch.utils.swap_tensors`` gives an object another one, elsewhere.
    """

    form: _Form
    stream: int
    stand_ins: bool
    tensor: Tensor
    addresses: list[int] | bytes
    implementations: list[object]


class ExpertGroup:
    """The tensors of all groups, of the same shape, dtype and device.

    Facts on them are cached while their form is unchanged.

    Attributes:
        tensors: one per group. A tensor that is replaced by another object needs a new :class:`ExpertGroup`.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self._forms: list[_Form] = []
        self._whole: _Whole | None = None

    def is_uniform(self) -> bool:
        """Whether all tensors really have the same shape, dtype and device."""
        return self._form().is_uniform

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are the group's."""
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))

    def values(self) -> Matrices:
        """One stacked tensor [E, ...] if they are contiguous, else the tensors; without a copy, outside of autograd."""
        if is_traced(self.tensors[0]) or (active() and any(map(has_no_data, self.tensors))):
            return self.tensors
        return self._values_of(self._form(), addresses_of(self.tensors))

    def held(self, stand_ins: bool) -> tuple[Tensor, Matrices]:
        """:meth:`whole` and :meth:`values`."""
        form, addresses = self._form(), addresses_of(self.tensors)
        return self._whole_of(form, stand_ins, addresses), self._values_of(form, addresses)

    def same(self, tensors: Sequence[Tensor]) -> Matrices | None:
        """:meth:`values` for tensors of a known form at the addresses of the group's; None if they are not."""
        addresses = addresses_of(tensors)
        for form in reversed(self._forms):  # the form of backwards is kept last
            values = form.values
            if values is not None and values.addresses == addresses and form.matches(*tensors):
                if form is not self._forms[-1]:
                    self._forms = [*(other for other in self._forms if other is not form), form]
                return values.matrices
        return None

    def _values_of(self, form: _Form, addresses: list[int] | bytes) -> Matrices:
        values = form.values
        if values is not None and addresses == values.addresses:
            return values.matrices
        one = as_one(self.tensors)
        matrices: Matrices = self.tensors if one is None else one
        for other in self._forms:
            if other.values is not None and other.values.addresses != addresses:
                other.values = None  # it would keep memory that the tensors have left
        form.values = _Values(addresses, matrices) if type(one) is Tensor and not one.is_inference() else None
        return matrices

    def whole(self, stand_ins: bool) -> Tensor:
        """A tensor that represents all of them in autograd: each gets its part of the stacked gradient.

        It has their shape [E, ...] and no data, and is made once per stream, as autograd runs its backward there.
        Hundreds of separate inputs would cost autograd more time than the kernels.

        Args:
            stand_ins: gradients are only for those that have ``grad_added_to_main_grad``.
        """
        return self._whole_of(self._form(), stand_ins)

    def _whole_of(self, form: _Form, stand_ins: bool, addresses: list[int] | bytes | None = None) -> Tensor:
        stream, kept = stream_of(self.tensors[0]), self._whole
        if kept is not None and kept.form is form and kept.stream == stream and kept.stand_ins == stand_ins:
            addresses = addresses or addresses_of(self.tensors)
            if addresses == kept.addresses or self._represents(kept, addresses):
                return kept.tensor
        self._whole = kept = None  # before the next is made, which would share its nodes
        with torch.enable_grad():  # a call that records may come after one that does not
            whole: Tensor = _StandIns.apply(*self.tensors) if stand_ins else _stacked(self.tensors)  # type: ignore[no-untyped-call]
        # FSDP2 takes the gradients after that of the module's input, in a node that is younger than a cached one
        in_time = whole.grad_fn is None or run_when_ready(whole.grad_fn)
        if in_time and type(whole) is Tensor and all(t.is_leaf for t in self.tensors) and not whole.is_inference():
            of_tensors = addresses_of(self.tensors), list(map(implementation_of, self.tensors))
            self._whole = _Whole(form, stream, stand_ins, whole, *of_tensors)
        return whole

    def _represents(self, whole: _Whole, addresses: list[int] | bytes) -> bool:
        """Whether gradients still reach the tensors, which now have these addresses instead of others."""
        reached = whole.implementations == list(map(implementation_of, self.tensors))
        if reached:
            self._whole = whole._replace(addresses=addresses)
        return reached

    def _form(self) -> _Form:
        """The facts on the current form, looked up again as ``.data`` and in-place views change it without notice."""
        for form in self._forms:
            if form.matches(*self.tensors):
                return form
        form = _Form(self.tensors)
        if form.matches is not _unknown:
            if len(self._forms) >= _MANY_FORMS:
                self._forms.clear()
            self._forms.append(form)
        return form


class _StackedWithoutData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A tensor of the stack's shape without data; its node hands out parts of its gradient.

    Torch's own node does that in less time than a Python one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.stack.default:
            return func(*args, **(kwargs or {}))
        return _without_data(args[0])


def _stacked(tensors: tuple[Tensor, ...]) -> Tensor:
    """A tensor without data whose stacked gradient is split among the tensors."""
    kind = tensors[0].device.type
    autocast = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
    with autocast, _StackedWithoutData():  # type: ignore[no-untyped-call]
        return torch.stack(tensors)


def _without_data(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(()).expand(len(tensors), *tensors[0].shape)


class _StandIns(torch.autograd.Function):
    """Like :func:`_stacked`; the gradient is a marker, and only tensors that look for it get their part."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tensors = tensors
        return _without_data(tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.tensors)
        takes = [getattr(t, "grad_added_to_main_grad", None) is not None for t in ctx.tensors]
        return tuple([part if taken else None for part, taken in zip(gradient.unbind(), takes, strict=True)])
