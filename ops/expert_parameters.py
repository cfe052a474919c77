"""Parameters of groups: one stacked tensor, or one tensor a group, all views of one storage where possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..fuser import Op
from .backends.problem import Matrices


class ExpertParameters(Op):
    """An op with parameters per group: ``weight`` [E, ...], or ``weight0``, ``weight1``, … for those in ``per_group``.

    ``load_state_dict`` reads either form, whichever the op has.
    """

    num_groups: int
    per_group: dict[str, bool]
    transposed_weight: bool

    def add_expert_parameter(self, name: str, data: Tensor, single: bool) -> None:
        """Registers ``data`` [E, ...] as one parameter, or as one a group."""
        self.per_group[name] = not single
        if single:
            self.register_parameter(name, nn.Parameter(data))
        for i, part in enumerate(() if single else data):
            self.register_parameter(f"{name}{i}", nn.Parameter(part))

    def parameter_names(self, name: str) -> list[str]:
        """The registered names of an expert parameter, in group order."""
        return [f"{name}{i}" for i in range(self.num_groups)] if self.per_group[name] else [name]

    def expert_parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters themselves, as they are now."""
        return [getattr(self, n) for n in self.parameter_names(name)]

    def matrices(self, name: str, dtype: torch.dtype | None = None) -> Matrices:
        """All groups' values without a copy: stacked if they lie so, else one by one. Cast if ``dtype`` differs.

        A weight is [E, N, K] however it is stored.
        """
        values = self._stored(name, dtype)
        if name == "weight" and self.transposed_weight:
            return values.mT if isinstance(values, Tensor) else tuple(value.mT for value in values)
        return values

    def _stored(self, name: str, dtype: torch.dtype | None) -> Matrices:
        parameters = self.expert_parameters(name)
        values = _as_one(parameters) if self.per_group[name] else parameters[0]
        if dtype is None or parameters[0].dtype == dtype:
            return tuple(parameters) if values is None else values
        return tuple(p.to(dtype) for p in parameters) if values is None else values.to(dtype)

    def split_gradient(self, name: str, gradient: Callable[[], Tensor]) -> dict[str, Callable[[], Tensor]]:
        """The gradient [E, ...] by parameter name; computed once, when the first is asked for."""
        if not self.per_group[name]:
            return {name: gradient}
        made: list[Tensor] = []

        def part(i: int) -> Tensor:
            if not made:
                made.append(gradient())
            return made[0][i]

        return {n: partial(part, i) for i, n in enumerate(self.parameter_names(name))}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``.to()`` and its kin: what they scatter is put into one storage again."""
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._gather()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        """So are the parts of a copy or a pickle."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._gather()

    def _gather(self) -> None:
        for name in (name for name, split in self.per_group.items() if split):
            parameters = self.expert_parameters(name)
            if not parameters[0].is_meta and _as_one(parameters) is None:
                for parameter, part in zip(parameters, torch.stack([p.data for p in parameters]), strict=True):
                    parameter.data = part

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, split in self.per_group.items():
            one, many = f"{prefix}{name}", [f"{prefix}{name}{i}" for i in range(self.num_groups)]
            if split and one in state_dict and len(state_dict[one]) == self.num_groups:
                state_dict.update(zip(many, state_dict.pop(one), strict=True))
            elif not split and one not in state_dict and all(key in state_dict for key in many):
                state_dict[one] = torch.stack([state_dict.pop(key) for key in many])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _as_one(parameters: list[nn.Parameter]) -> Tensor | None:
    """The parameters as one stacked tensor over their common storage; None if they do not lie one after the other."""
    first = parameters[0]
    if first.is_meta or not first.is_contiguous():
        return None
    base, step, storage = first.data_ptr(), first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    for i, p in enumerate(parameters):
        if p.data_ptr() != base + i * step or p.untyped_storage().data_ptr() != storage or p.dtype != first.dtype:
            return None
    return first.detach().as_strided((len(parameters), *first.shape), (first.numel(), *first.stride()))
