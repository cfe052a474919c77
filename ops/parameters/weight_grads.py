"""The destination of a grouped linear's weight gradient: autograd or ``main_grad``, now or in ``backward_dw()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...fuser import Grads
from ...fuser.contract import tracing as trace
from ...fuser.contract.op import Delivery, SideEffects
from ...fuser.contract.stored_values import stores_values
from ...fuser.replay import capture
from ...fuser.runtime.residuals import tensors_of
from .. import kernels
from ..kernels import Matrices
from ..quantized.linear import WgradOperand, wgrad_of
from .delayed_work import DelayedWork
from .group import ExpertGroup
from .grouped import ExpertParameters
from .main_grads import Destination, MainGrads, foreseen
from .stand_ins import StandIns

_is_trained = attrgetter("requires_grad")
Wgrad = Callable[..., Matrices]
"""Computes ``dy^T x`` by group, in the shape of the weight; takes ``out``, ``out_dtype``, ``terms`` of the kernel."""


class WeightGrads(ExpertParameters):
    """The weight-gradient part of :class:`GroupedLinear`."""

    untraced = frozenset({"_delayed", "_hooks", "_groups", "_main_grads", "_stand_ins"})
    accumulate_into_main_grad: bool
    delay_wgrad_compute: bool

    def init_weight_grads(self, accumulate_into_main_grad: bool, delay_wgrad_compute: bool) -> None:
        """Initialises the protocol; call it after registering the weights."""
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self._delayed, self._main_grads, self._stand_ins = DelayedWork[WeightGrads](), MainGrads(), StandIns()
        self._hooks: list[Callable[[], None]] = []
        self._mark_weights()

    def trace_refusal(self) -> str | None:
        if not any([p.requires_grad for p in self.expert_parameters("weight")]):
            return None
        if self.delay_wgrad_compute:
            return "delay_wgrad_compute keeps Python objects for backward_dw(), which compiled code cannot"
        if self.accumulate_into_main_grad:
            return "accumulate_into_main_grad writes attributes of parameters, which compiled code cannot"
        return None

    def weight_grads(
        self,
        dy: WgradOperand | None,
        x: WgradOperand | None,
        split_sizes: Tensor,
        needs_grad: frozenset[str],
        rows: int = 0,
        independent: kernels.Independent | None = None,
    ) -> Grads:
        """The gradient of the weights, by name and stacked, from ``dy`` [T, N] and ``x`` [T, K] in the form that it
        reads.

        Args:
            needs_grad: the names that autograd wants, without a role prefix.
            rows: T, which the shapes of quantised operands do not show.
            independent: the independent products that this one belongs to, unless it is delayed.
        """
        if x is None or dy is None or "weight" not in needs_grad:
            return {}
        product = wgrad_of(*((x, dy) if self.transposed_weight else (dy, x)), split_sizes, rows)

        def wgrad(**options: Any) -> Matrices:
            is_copied = self.accumulate_into_main_grad and "out" not in options  # by torch, behind the product
            return product(**options, independent=None if is_copied else independent)

        overlaps = independent is not None and not self.delay_wgrad_compute
        return self._delivered(wgrad if overlaps else product, (x, dy))

    def _delivered(self, wgrad: Wgrad, reads: tuple[WgradOperand, ...]) -> Grads:
        """Delivers the gradient of the weights, by name, that ``wgrad`` computes from the tensors that it ``reads``."""
        if self._computed and (self.delay_wgrad_compute or self.accumulate_into_main_grad):
            self._refuse_computed()
        if (self.delay_wgrad_compute or self.accumulate_into_main_grad) and trace.active():
            self._foresee(wgrad)
            return {"weight": None}
        if self.delay_wgrad_compute:
            self._delay(wgrad, self._trained(), tensors_of(reads))
            return {"weight": None}
        if self.accumulate_into_main_grad:
            names = self._trained()
            return {"weight": lambda: self._into_main_grad(wgrad, names)}
        dtype = self.one_parameter("weight").dtype
        return {"weight": lambda: wgrad(out_dtype=dtype)}  # type: ignore[dict-item, return-value]

    def deliveries(self, wanted: frozenset[str], role: str = "") -> Sequence[Delivery]:
        """The deliveries of the weight gradient to ``main_grad``, or of delayed ones."""
        if not (self.accumulate_into_main_grad or self.delay_wgrad_compute) or f"{role}weight" not in wanted:
            return ()
        return (Delivery(f"{role}weight", partial(self._side_effects, role)),)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are delayed, so that each backward needs a :meth:`backward_dw`."""
        return self.delay_wgrad_compute

    def has_delayed_wgrad(self) -> bool:
        """Whether weight gradients are waiting for :meth:`backward_dw`."""
        return bool(self._delayed)

    def backward_dw(self) -> None:
        """Computes the delayed weight gradients, first in first out, and adds them to ``.grad`` or ``main_grad``.

        Without a delayed gradient it does nothing. Afterwards the hooks of
        :meth:`register_wgrad_accumulation_and_reduce_hooks` run. A weight that was frozen after the backward gets no
        gradient. Any thread may call it.

        Raises:
            RuntimeError: ``accumulate_into_main_grad`` without a fitting ``main_grad``; an ``x`` or a gradient of ``y``
                that was modified in place meanwhile; or a weight of another shape. A gradient that raised stays
                delayed, and no part of it has been added.
        """
        with torch.no_grad():
            ran = self._delayed.run(self)
        for hook in self._hooks if ran else ():
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Adds a function that :meth:`backward_dw` calls after computing the gradients."""
        self._hooks.append(hook)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._main_grads.forget()
        self._stand_ins.forget()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_weights()

    def _gather(self) -> None:
        super()._gather()
        self._mark_weights()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None and self.__dict__.get("delay_wgrad_compute") and name in self.parameter_names("weight"):
            _mark(param)

    def _mark_weights(self) -> None:
        """Marks the weights so that Megatron's hooks wait for the gradients; replaced parameters lack the mark."""
        for name in self.parameter_names("weight") if self.delay_wgrad_compute else ():
            if (parameter := self._parameters.get(name)) is not None:  # else it is computed
                _mark(parameter)

    def _refuse_computed(self) -> None:
        """Raises if a weight is computed, as it then has neither a .grad nor a main_grad."""
        for name in [name for name in self._computed if name.startswith("weight")]:
            raise RuntimeError(
                f"{type(self).__name__}: {name} is computed by a parametrization or a hook, so its gradient must go "
                "through autograd: without accumulate_into_main_grad and delay_wgrad_compute"
            )

    def _has_stand_ins(self, name: str) -> bool:
        return name == "weight" and self.accumulate_into_main_grad

    def _trained(self) -> tuple[str, ...]:
        """The names of the weights that require gradients."""
        names = tuple(self.parameter_names("weight"))
        flags = list(map(_is_trained, self.expert_parameters("weight")))
        return names if all(flags) else tuple([name for name, flag in zip(names, flags, strict=True) if flag])

    def _of_names(self, names: tuple[str, ...]) -> list[nn.Parameter]:
        everything = len(names) == self.num_groups or not self.per_group["weight"]
        return self.expert_parameters("weight") if everything else [getattr(self, name) for name in names]

    def _side_effects(self, role: str) -> SideEffects:
        if self.delay_wgrad_compute:
            return SideEffects((), (role, "delayed"))
        names = self._trained()
        parameters = self._of_names(names)
        goes = self._destination(names, parameters)
        values = goes.values if self.per_group["weight"] else goes.group.tensors[0]
        tensors = (values,) if isinstance(values, Tensor) else tuple(values)
        shared = (self._stand_ins.memory(*self._stand_in_form(parameters[0])),) if any(goes.flagged) else ()

        def done() -> None:
            torch.autograd.graph.increment_version(goes.group.tensors)
            goes.flag(parameters)

        facts = role, names, tuple(goes.add), tuple(goes.flagged), goes.zeros
        return SideEffects((*tensors, *shared), facts, tensors, done)

    def _delay(self, wgrad: Wgrad, names: tuple[str, ...], reads: list[Tensor]) -> None:
        """Delays a weight gradient, and checks versions later, as autograd cannot detect overwritten tensors then."""
        capture.refuse("a weight gradient is computed later")
        versions = [t._version for t in reads]
        weight = self.one_parameter("weight")
        shape, device = weight.shape, weight.device

        def later(op: WeightGrads) -> None:  # the op itself: what runs the backward may be a view of it
            name = f"{type(op).__name__}.backward_dw"
            if [t._version for t in reads] != versions:
                raise RuntimeError(f"{name}: x or the gradient of y was modified in place since the backward")
            trained = op._trained()
            left = tuple([weight for weight in names if weight in trained])
            if left:
                _refuse_replaced(name, left, op._of_names(left), shape, device)
                op._finish(wgrad, left)

        self._delayed.add(later)

    def _finish(self, wgrad: Wgrad, names: tuple[str, ...]) -> None:
        if self._computed:
            self._refuse_computed()
        parameters = self._of_names(names)
        if self.accumulate_into_main_grad:
            stand_in = self._into_main_grad(wgrad, names)
            if stand_in is not None:  # autograd's backward is over: who waits for a gradient looks for it in .grad
                self._give(stand_in, names)
            return
        grads = [torch.empty_like(p) if p.grad is None else p.grad for p in parameters]
        self._write(wgrad, names, ExpertGroup(tuple(grads)), [p.grad is not None for p in parameters])
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad

    def _give(self, stand_in: Tensor, names: tuple[str, ...]) -> None:
        """Sets the stand-in as ``.grad`` of weights with ``main_grad`` flags, as autograd does without delay."""
        stand_ins = stand_in.unbind() if self.per_group["weight"] else (stand_in,)
        for name, part in zip(self.parameter_names("weight"), stand_ins, strict=True):
            parameter = getattr(self, name)
            if name in names and getattr(parameter, "grad_added_to_main_grad", False) and parameter.grad is None:
                parameter.grad = part.detach()

    def _into_main_grad(self, wgrad: Wgrad, names: tuple[str, ...]) -> Tensor | None:
        """Adds the gradients to ``main_grad``; returns the stand-ins for autograd that Megatron's hooks expect."""
        parameters = self._of_names(names)
        goes = self._destination(names, parameters)
        self._write(wgrad, names, goes.group, goes.add)
        goes.flag(parameters)
        return self._stand_ins.of(*self._stand_in_form(parameters[0]), goes.zeros) if any(goes.flagged) else None

    def _destination(self, names: tuple[str, ...], parameters: Sequence[nn.Parameter]) -> Destination:
        return self._main_grads.of(type(self).__name__, names, parameters, self._parameters.values())

    def _stand_in_form(self, weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return weight, (self.num_groups, *weight.shape) if self.per_group["weight"] else tuple(weight.shape)

    def _foresee(self, wgrad: Wgrad) -> None:
        """Records for a trace the work of :meth:`_delay` and :meth:`_into_main_grad`, without doing it."""
        names = self._trained()
        parameters = self._of_names(names)
        if self.delay_wgrad_compute:
            trace.note("the gradient of the weights is computed by backward_dw()")
        if self.accumulate_into_main_grad:
            targets, add, missing = foreseen(type(self).__name__, names, parameters)
            if missing:
                trace.note(f"{missing[0]}.main_grad is not there yet; it is taken to be float32")
        else:
            targets = ExpertGroup(tuple([p if p.grad is None else p.grad for p in parameters]))
            add = [p.grad is not None for p in parameters]
        self._multiply(wgrad, names, targets, add)

    def _write(self, wgrad: Wgrad, names: tuple[str, ...], targets: ExpertGroup, add: list[bool]) -> None:
        """Writes or adds the gradients of the named weights to the targets."""
        gradient = self._multiply(wgrad, names, targets, add)
        if gradient is None:
            torch.autograd.graph.increment_version(targets.tensors)
            return
        for name, target, adds in zip(names, targets.tensors, add, strict=True):
            part = gradient[self.parameter_names("weight").index(name)]
            target.add_(part) if adds else target.copy_(part)

    def _multiply(self, wgrad: Wgrad, names: tuple[str, ...], targets: ExpertGroup, add: list[bool]) -> Matrices | None:
        """Computes the gradients in place if one product can, and returns None; else returns all gradients."""
        everything = names == tuple(self.parameter_names("weight"))
        if everything and len(set(add)) == 1 and targets.is_uniform():
            out = targets.values() if self.per_group["weight"] else targets.tensors[0]
            wgrad(out=out, terms=kernels.ADDED if add[0] else kernels.NO_TERMS)
            return None
        return wgrad(out_dtype=reduce(torch.promote_types, {target.dtype for target in targets.tensors}))


def _refuse_replaced(
    op: str, names: Sequence[str], parameters: Sequence[nn.Parameter], shape: torch.Size, device: torch.device
) -> None:
    """Raises if a weight was replaced since the backward by one that the gradient does not fit."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.shape != shape or parameter.device != device or not stores_values(type(parameter)):
            raise RuntimeError(
                f"{op}: {name} was a parameter of shape {list(shape)} on {device} in the backward, "
                f"now it is a {type(parameter).__name__} of shape {list(parameter.shape)} on {parameter.device}; "
                "call backward_dw() before replacing it"
            )


def _mark(parameter: nn.Parameter) -> None:
    parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
