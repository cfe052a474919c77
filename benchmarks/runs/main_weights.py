"""AdamW on float32 main weights of a model in 16 bits, as trainers keep them on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

LEARNING_RATE = 3e-4


class MainWeights:
    """One optimizer for each group of parameters: a step has the float32 gradients of one group at a time.

    Args:
        groups: parameters, each in one group.
    """

    def __init__(self, groups: Iterable[Sequence[nn.Parameter]]) -> None:
        self._groups = [_Group(group) for group in groups if group]

    def step(self) -> None:
        """Updates the main weights, rounds them to the parameters, and drops the gradients."""
        for group in self._groups:
            group.step()

    def tensors(self) -> Iterable[Tensor]:
        """All tensors that are held between steps."""
        return [tensor for group in self._groups for tensor in group.tensors()]


class _Group:
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._main = [p.detach().float() for p in parameters]
        self._optimizer = adamw(self._main)

    def step(self) -> None:
        for main, parameter in zip(self._main, self._parameters, strict=True):
            main.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(self._parameters), self._main)

    def tensors(self) -> Iterable[Tensor]:
        return [*self._main, *state_of(self._optimizer)]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """The optimizer of all contestants, in one kernel a step."""
    return torch.optim.AdamW(list(parameters), lr=LEARNING_RATE, fused=True)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


def groups_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Each layer's parameters, and all others."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict))
    groups = [[*layer.parameters()] for layer in layers.children()]
    grouped = {id(p) for group in groups for p in group}
    return [*groups, [p for p in model.parameters() if id(p) not in grouped]]
