"""Where the gradient of a grouped linear's weight goes: to autograd or ``main_grad``, now or in ``backward_dw()``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..fuser import Grads, recorder
from ..fuser.op import Targets
from . import kernels
from .expert_group import ExpertGroup
from .expert_parameters import ExpertParameters
from .kernels import Layout, Matrices

Wgrad = Callable[..., Matrices]
"""Computes ``dy^T x`` by group, in the shape of the weight; takes ``out``, ``out_dtype``, ``beta`` of the kernel."""


class WeightGrads(ExpertParameters):
    """The weight-gradient half of :class:`GroupedLinear`."""

    untraced = frozenset({"_delayed", "_hooks", "_groups"})
    accumulate_into_main_grad: bool
    delay_wgrad_compute: bool

    def init_weight_grads(self, accumulate_into_main_grad: bool, delay_wgrad_compute: bool) -> None:
        """Sets the protocol; to be called once the weights are registered."""
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self._delayed: deque[Callable[[], None]] = deque()
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

    def weight_grads(self, dy: Tensor, x: Tensor | None, split_sizes: Tensor, needs_grad: frozenset[str]) -> Grads:
        """The gradient of the weights, by name and stacked, from ``dy`` [T, N] and ``x`` [T, K].

        Args:
            needs_grad: the names that autograd wants, without a role in front.
        """
        if "weight" not in needs_grad or x is None:
            return {}
        if self._modules and (self.delay_wgrad_compute or self.accumulate_into_main_grad):
            self._refuse_computed()
        rows = x
        left, right = (rows, dy) if self.transposed_weight else (dy, rows)

        def wgrad(**how: Any) -> Matrices:
            return kernels.grouped_gemm(Layout.TN, left, right, split_sizes, **how)

        if self.delay_wgrad_compute:
            self._delay(wgrad, self._trained(), (rows, dy))
            return {"weight": None}
        if self.accumulate_into_main_grad:
            names = self._trained()
            self._into_main_grad(wgrad, names)
            return {"weight": self._stand_in(names)}
        dtype = self.one_parameter("weight").dtype
        return {"weight": lambda: wgrad(out_dtype=dtype)}  # type: ignore[dict-item, return-value]

    def targets(self, wanted: frozenset[str], role: str = "") -> Targets | None:
        """The ``main_grad`` of the weights, where their gradients go there."""
        if not self.accumulate_into_main_grad or self.delay_wgrad_compute or f"{role}weight" not in wanted:
            return None
        names = self._trained()
        parameters = self._of_names(names)
        group, add = self._main_grads(names, parameters)
        flags, zeros = _attributes(parameters, "grad_added_to_main_grad", "zero_out_wgrad")
        flagged = [flag is not None for flag in flags]

        def written() -> None:
            torch.autograd.graph.increment_version(group.tensors)
            if any(flagged):
                _flag(parameters)

        values = group.values() if self.per_group["weight"] else group.tensors[0]
        facts = names, tuple(add), tuple(flagged), any(zeros)
        return Targets([values] if isinstance(values, Tensor) else list(values), facts, written)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for :meth:`backward_dw`."""
        return bool(self._delayed)

    def backward_dw(self) -> None:
        """Computes the delayed weight gradients, first in first out, and adds them to ``.grad`` or ``main_grad``.

        With nothing delayed it does nothing. Then :meth:`register_wgrad_accumulation_and_reduce_hooks`' hooks run.

        Raises:
            RuntimeError: ``accumulate_into_main_grad`` without a fitting ``main_grad``; or an ``x`` or a gradient of
                ``y`` that was modified in place meanwhile. What could not be computed stays delayed.
        """
        if not self._delayed:
            return
        with torch.no_grad():
            while self._delayed:
                self._delayed[0]()
                self._delayed.popleft()  # once it is done: what raises can be mended, and is not lost
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Adds a function that :meth:`backward_dw` calls when the gradients are there."""
        self._hooks.append(hook)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_delayed": deque()}

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
        """Tells Megatron's hooks that the gradients come later; parameters that are new here do not know."""
        for parameter in self.expert_parameters("weight") if self.delay_wgrad_compute else ():
            _mark(parameter)

    def _refuse_computed(self) -> None:
        """Raises where a weight is computed by a parametrization: then it has neither a .grad nor a main_grad."""
        computed: Any = self._modules.get("parametrizations", ())
        for name in [name for name in computed if name.startswith("weight")]:
            raise RuntimeError(
                f"{type(self).__name__}: {name} is computed by a parametrization, so its gradient must go through "
                "autograd: without accumulate_into_main_grad and delay_wgrad_compute"
            )

    def _has_stand_ins(self, name: str) -> bool:
        return name == "weight" and self.accumulate_into_main_grad

    def _trained(self) -> tuple[str, ...]:
        """The names of the weights that are not frozen."""
        names = tuple(self.parameter_names("weight"))
        flags = [p.requires_grad for p in self.expert_parameters("weight")]
        return names if all(flags) else tuple([name for name, flag in zip(names, flags, strict=True) if flag])

    def _of_names(self, names: tuple[str, ...]) -> list[nn.Parameter]:
        everything = len(names) == self.num_groups or not self.per_group["weight"]
        return self.expert_parameters("weight") if everything else [getattr(self, name) for name in names]

    def _delay(self, wgrad: Wgrad, names: tuple[str, ...], reads: tuple[Tensor, ...]) -> None:
        """Puts a weight gradient off, which autograd's check for tensors that were overwritten does not see."""
        recorder.refuse("a weight gradient is computed later")
        versions = [t._version for t in reads]

        def later() -> None:
            if [t._version for t in reads] != versions:
                op = type(self).__name__
                raise RuntimeError(f"{op}.backward_dw: x or the gradient of y was modified in place since the backward")
            self._finish(wgrad, names)

        self._delayed.append(later)

    def _finish(self, wgrad: Wgrad, names: tuple[str, ...]) -> None:
        if self.accumulate_into_main_grad:
            self._into_main_grad(wgrad, names)
            _flag(self._of_names(names))
            return
        parameters = self._of_names(names)
        grads = []
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grads.append(parameter.grad)
        self._write(wgrad, names, ExpertGroup(tuple(grads)), [True] * len(names))

    def _into_main_grad(self, wgrad: Wgrad, names: tuple[str, ...]) -> None:
        self._write(wgrad, names, *self._main_grads(names, self._of_names(names)))

    def _main_grads(self, names: tuple[str, ...], parameters: Sequence[nn.Parameter]) -> tuple[ExpertGroup, list[bool]]:
        """Where the gradients of the named weights go, and which are added to what is there."""
        op = type(self).__name__
        fetchers, grads, overwrite = _attributes(parameters, "get_main_grad", "main_grad", "overwrite_main_grad")
        fetched = tuple([g if fetch is None else fetch() for fetch, g in zip(fetchers, grads, strict=True)])
        group = self._groups.get("main_grad")
        if group is None or not group.holds(fetched):
            checked = [_main_grad(op, *each) for each in zip(names, parameters, fetched, strict=True)]
            group = self._groups["main_grad"] = ExpertGroup(tuple(checked))
        return group, [not o for o in overwrite]

    def _write(self, wgrad: Wgrad, names: tuple[str, ...], targets: ExpertGroup, add: list[bool]) -> None:
        """Writes or adds the gradients of the named weights into the targets."""
        everything = names == tuple(self.parameter_names("weight"))
        if everything and len(set(add)) == 1:
            wgrad(
                out=targets.values() if self.per_group["weight"] else targets.tensors[0], beta=1.0 if add[0] else None
            )
            torch.autograd.graph.increment_version(targets.tensors)
            return
        gradient = wgrad(out_dtype=targets.tensors[0].dtype)
        for name, target, adds in zip(names, targets.tensors, add, strict=True):
            part = gradient[self.parameter_names("weight").index(name)]
            target.add_(part) if adds else target.copy_(part)

    def _stand_in(self, names: tuple[str, ...]) -> Tensor | None:
        """What autograd is given for gradients that lie in ``main_grad``, as Megatron's optimizer hooks expect it."""
        flagged = _flag(self._of_names(names))
        if not flagged:
            return None
        zeros = any(_attributes(flagged, "zero_out_wgrad")[0])
        groups = (self.num_groups,) if self.per_group["weight"] else ()
        gradient = flagged[0].new_empty((*groups, *flagged[0].shape))
        return gradient.zero_() if zeros else gradient


def _mark(parameter: nn.Parameter) -> None:
    parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]


def _flag(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Says of those that want to know that their gradients are in ``main_grad``; returns them."""
    (flags,) = _attributes(parameters, "grad_added_to_main_grad")
    flagged = [p for p, flag in zip(parameters, flags, strict=True) if flag is not None]
    for parameter in flagged:
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return flagged


def _attributes(parameters: Sequence[nn.Parameter], *names: str) -> list[list[Any]]:
    """Of each name what each parameter has under it, None if nothing; plain ones are not asked by a failing look-up."""
    plain = nn.Parameter
    own = [p.__dict__ if type(p) is plain else {name: getattr(p, name, None) for name in names} for p in parameters]
    return [[each.get(name) for each in own] for name in names]


def _main_grad(op: str, name: str, parameter: nn.Parameter, grad: Any) -> Tensor:
    """The parameter's ``main_grad`` in the parameter's shape, same memory; itself if it has that shape."""
    if not isinstance(grad, Tensor):
        raise RuntimeError(
            f"{op}: accumulate_into_main_grad needs {name}.main_grad, which is not set; "
            "set it to a tensor of the parameter's shape before the backward"
        )
    if grad.numel() != parameter.numel() or not grad.is_floating_point() or grad.device != parameter.device:
        raise RuntimeError(
            f"{op}: {name}.main_grad must be floating-point, on {parameter.device}, of shape {list(parameter.shape)}; "
            f"got {grad.dtype} on {grad.device}, shape {list(grad.shape)}"
        )
    if grad.shape == parameter.shape:
        return grad
    try:
        return grad.view(parameter.shape)
    except RuntimeError:
        raise RuntimeError(
            f"{op}: {name}.main_grad, of shape {list(grad.shape)} and strides {list(grad.stride())}, "
            f"cannot be viewed as {list(parameter.shape)}; make it contiguous"
        ) from None
