"""Where the gradient of a grouped linear's weight goes: to autograd or ``main_grad``, now or in ``backward_dw()``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..fuser import Grads
from . import kernels
from .expert_parameters import ExpertParameters
from .kernels import Layout, Matrices

Wgrad = Callable[..., Matrices]
"""Computes ``dy^T x`` by group, in the shape of the weight; takes ``out``, ``out_dtype``, ``beta`` of the kernel."""


class WeightGrads(ExpertParameters):
    """The weight-gradient half of :class:`GroupedLinear`."""

    accumulate_into_main_grad: bool
    delay_wgrad_compute: bool

    def init_weight_grads(self, accumulate_into_main_grad: bool, delay_wgrad_compute: bool) -> None:
        """Sets the protocol; to be called once the weights are registered."""
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self._delayed: deque[Callable[[], None]] = deque()
        self._hooks: list[Callable[[], None]] = []
        if delay_wgrad_compute:
            for parameter in self.expert_parameters("weight"):
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def weight_grads(self, dy: Tensor, x: Tensor | None, split_sizes: Tensor, needs_grad: frozenset[str]) -> Grads:
        """The gradients of the weights by name, from ``dy`` [T, N] and ``x`` [T, K].

        Args:
            needs_grad: the names that autograd wants, without a role in front.
        """
        wanted = [name for name in self.parameter_names("weight") if name in needs_grad]
        if not wanted or x is None:
            return {}
        rows = x
        left, right = (rows, dy) if self.transposed_weight else (dy, rows)

        def wgrad(**how: Any) -> Matrices:
            return kernels.grouped_gemm(Layout.TN, left, right, split_sizes, **how)

        if self.delay_wgrad_compute:
            self._delay(wgrad, wanted, (rows, dy))
            return dict.fromkeys(wanted)
        if self.accumulate_into_main_grad:
            self._into_main_grad(wgrad, wanted)
            return {name: _dummy(getattr(self, name)) for name in wanted}
        dtype = getattr(self, wanted[0]).dtype
        grads = self.split_gradient("weight", lambda: wgrad(out_dtype=dtype))  # type: ignore[arg-type, return-value]
        return {name: grads[name] for name in wanted}

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for :meth:`backward_dw`."""
        return bool(self._delayed)

    def backward_dw(self) -> None:
        """Computes the delayed weight gradients, first in first out, and adds them to ``.grad`` or ``main_grad``.

        With nothing delayed it does nothing. Then :meth:`register_wgrad_accumulation_and_reduce_hooks`' hooks run.

        Raises:
            RuntimeError: ``accumulate_into_main_grad`` without a fitting ``main_grad``; or an ``x`` or a gradient of
                ``y`` that was modified in place meanwhile.
        """
        if not self._delayed:
            return
        with torch.no_grad():
            while self._delayed:
                self._delayed.popleft()()
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Adds a function that :meth:`backward_dw` calls when the gradients are there."""
        self._hooks.append(hook)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_delayed": deque()}

    def _delay(self, wgrad: Wgrad, names: list[str], reads: tuple[Tensor, ...]) -> None:
        """Puts a weight gradient off, which autograd's check for tensors that were overwritten does not see."""
        versions = [t._version for t in reads]

        def later() -> None:
            if [t._version for t in reads] != versions:
                op = type(self).__name__
                raise RuntimeError(f"{op}.backward_dw: x or the gradient of y was modified in place since the backward")
            self._finish(wgrad, names)

        self._delayed.append(later)

    def _finish(self, wgrad: Wgrad, names: list[str]) -> None:
        if self.accumulate_into_main_grad:
            self._into_main_grad(wgrad, names)
            for name in names:
                _dummy(getattr(self, name), allocate=False)
            return
        parameters = [getattr(self, name) for name in names]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._write(wgrad, names, [p.grad for p in parameters], [True] * len(names))

    def _into_main_grad(self, wgrad: Wgrad, names: list[str]) -> None:
        parameters = [getattr(self, name) for name in names]
        grads = [_main_grad(type(self).__name__, name, p) for name, p in zip(names, parameters, strict=True)]
        self._write(wgrad, names, grads, [not getattr(p, "overwrite_main_grad", False) for p in parameters])

    def _write(self, wgrad: Wgrad, names: list[str], targets: list[Tensor], add: list[bool]) -> None:
        """Writes or adds the gradients of the named weights into the targets."""
        everything = names == self.parameter_names("weight")
        if everything and len(set(add)) == 1:
            wgrad(out=targets if self.per_group["weight"] else targets[0], beta=1.0 if add[0] else None)
            return
        gradient = wgrad(out_dtype=targets[0].dtype)
        for name, target, adds in zip(names, targets, add, strict=True):
            part = gradient[self.parameter_names("weight").index(name)]
            target.add_(part) if adds else target.copy_(part)


def _main_grad(op: str, name: str, parameter: nn.Parameter) -> Tensor:
    """The parameter's ``main_grad`` in the parameter's shape, same memory."""
    fetch = getattr(parameter, "get_main_grad", None)
    grad = fetch() if fetch is not None else getattr(parameter, "main_grad", None)
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
    try:
        return grad.view(parameter.shape)
    except RuntimeError:
        raise RuntimeError(
            f"{op}: {name}.main_grad, of shape {list(grad.shape)} and strides {list(grad.stride())}, "
            f"cannot be viewed as {list(parameter.shape)}; make it contiguous"
        ) from None


def _dummy(parameter: nn.Parameter, allocate: bool = True) -> Tensor | None:
    """What autograd is given for a gradient that lies in ``main_grad``, as Megatron's optimizer hooks expect it."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    if not allocate:
        return None
    return torch.zeros_like(parameter) if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)
