"""Parameters of groups: one stacked tensor, or one tensor a group, all views of one storage where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ...fuser import ArgumentError, Op
from ...fuser.contract.tracing import WITHOUT_DATA
from ...fuser.runtime.residuals import Apart
from ..formats.copies import AMAX, SCALES
from ..kernels import has_objects
from ..kernels.problems.gemm import Matrices, first
from ..values.checks import check_parameter
from .group import ExpertGroup, as_one
from .stored import drop_note


class ExpertParameters(Op):
    """An op with parameters per group: ``weight`` [E, ...], or ``weight0``, ``weight1``, … for those in ``per_group``.

    ``load_state_dict`` reads either form, whichever the op has.
    """

    caches = frozenset({"_groups"})
    num_groups: int
    per_group: dict[str, bool]
    transposed_weight: bool
    is_quantized: bool = False  # whether the weight has 8 bits, and scales beside it
    _groups: dict[str, ExpertGroup]

    def init_expert_parameters(self) -> None:
        """To be called before parameters are added."""
        self.per_group, self._groups, self._count = {}, {}, 0

    def add_expert_parameter(self, name: str, data: Tensor, single: bool) -> None:
        """Registers ``data`` [E, ...] as one parameter, or as one a group."""
        self.per_group[name] = not single
        self._count += 1 if single else self.num_groups
        if single:
            self.register_parameter(name, nn.Parameter(data))
        for full_name, part in () if single else zip(_names(name, self.num_groups), data, strict=True):
            self.register_parameter(full_name, nn.Parameter(part))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Assigning comes here as well. What was found of parameters would keep one alive that is replaced."""
        super().register_parameter(name, param)
        for key, group in [*self._groups.items()]:
            number = name.removeprefix(key)
            if name == key or not number.isdecimal() or type(param) not in (nn.Parameter, type(None)):
                continue  # something else, or what FSDP puts there while it keeps the others
            if not any(tensor is param for tensor in group.tensors[int(number) :][:1]):
                del self._groups[key]

    @property
    def column_dims(self) -> dict[str, int | None]:
        """The dimension of a parameter, from the end, that has the columns of the output; None: none has them."""
        return {"weight": -1 if self.transposed_weight else -2, "bias": -1, "lora_a": None, "lora_b": -2}

    def parameter_names(self, name: str) -> list[str]:
        """The registered names of an expert parameter, in group order."""
        return list(_names(name, self.num_groups)) if self.per_group[name] else [name]

    def expert_parameters(self, name: str) -> list[nn.Parameter]:
        """The parameters themselves, as they are now."""
        return list(self._now(name)) if self.per_group[name] else [self.one_parameter(name)]

    def one_parameter(self, name: str) -> nn.Parameter:
        """The parameter, or the first group's: all are of its shape, dtype and device."""
        name = f"{name}0" if self.per_group[name] else name
        parameter = self._parameters.get(name)
        if parameter is None and (parameter := getattr(self, name)) is None:
            raise ArgumentError(f"{type(self).__name__}: {name} is None; to go without one, build the op so")
        return parameter

    def check_parameters(self, device: torch.device | None, **shapes: tuple[int, ...]) -> None:
        """Of the parameters, which anybody may have replaced; the shapes are those of one group.

        A name without a shape is not checked.
        """
        for name, split in self.per_group.items():
            if name not in shapes:
                continue
            if not split:
                form = (self.num_groups, *shapes[name]), device, self.is_quantized and name == "weight"
                check_parameter(name, self.one_parameter(name), *form)
                continue
            group = self._group(name)
            is_quantized = self.is_quantized and name == "weight"
            check_parameter(f"{name}0", group.tensors[0], shapes[name], device, is_quantized)
            if not group.is_uniform() and (misfit := _misfit(name, group.tensors)):
                raise ArgumentError(misfit)

    def matrices(self, name: str, dtype: torch.dtype | None = None) -> Matrices:
        """All groups' values without a copy: stacked if they lie so, else one by one. Cast if ``dtype`` differs.

        A weight is [E, N, K] however it is stored.
        """
        values: Matrices = self._values(name, self._group(name)) if self.per_group[name] else self.one_parameter(name)
        if dtype is not None and first(values).dtype != dtype:
            values = values.to(dtype) if isinstance(values, Tensor) else tuple(value.to(dtype) for value in values)
        return _upright(values) if name == "weight" and self.transposed_weight else values

    def to_save(self, name: str, values: Matrices) -> Any:
        """What a ``Saved`` holds for :meth:`matrices` of this call: the parameters, unless the values are a copy.

        Autograd then checks the version of each, and hooks on saved tensors see parameters, not views of them.
        """
        parameters = self._now(name) if self.per_group[name] else (self.one_parameter(name),)
        sample, value = parameters[0], values if isinstance(values, Tensor) else values[0]
        if value.dtype != sample.dtype or isinstance(sample, WITHOUT_DATA):
            return values
        turned = name == "weight" and self.transposed_weight
        return Apart(_Parameters(self, name, turned, len(parameters), sample.shape, sample.dtype), parameters)

    def saved_values(self, name: str, parameters: Sequence[Tensor]) -> Matrices:
        """The values of parameters that a forward saved, which may have been replaced since, as they lie."""
        if not self.per_group[name]:
            return parameters[0]
        group = self._groups.get(name)
        if group is None or not group.holds(parameters):
            group = ExpertGroup(tuple(parameters))
        return self._values(name, group)

    def _values(self, name: str, group: ExpertGroup) -> Matrices:
        """A group's, of one form each; what lies as one tensor has been found to be of one."""
        values = group.values()
        if not isinstance(values, Tensor) and not group.is_uniform():  # one was given other memory since the check
            raise ArgumentError(f"{type(self).__name__}: {_misfit(name, group.tensors)}")
        return values

    def input_names(self) -> tuple[str, ...]:
        """The groups of parameters count as one each, under their common name; what else is registered, by its own."""
        return (*self.per_group, *[name for name, _ in self._others()])

    def input_tensors(self) -> list[Tensor]:
        """A parameter, or the tensor that stands for those of all groups: its gradient is theirs, stacked."""
        tensors: list[Tensor] = []
        for name, split in self.per_group.items():
            tensors.append(self._group(name).whole(self._has_stand_ins(name)) if split else self.one_parameter(name))
        return tensors + [p for _, p in self._others()] if self._has_others() else tensors

    def autograd_inputs(self, grad_enabled: bool) -> list[Tensor]:
        held: list[Tensor] = []
        parameters = self._parameters
        for name, split in self.per_group.items():
            if split:
                group, values = self._group(name), None
                if grad_enabled:
                    whole, values = group.held(self._has_stand_ins(name))
                    held.append(whole)
                else:
                    values = group.values()
                held += (values,) if isinstance(values, Tensor) else values
            elif name in parameters and parameters[name] is not None:
                held += (parameters[name],)  # type: ignore[arg-type]
            else:
                held += (self.one_parameter(name),)
        if self.is_quantized:
            held += self.quantized_buffers()
        others = self._modules or self._forward_pre_hooks or len(parameters) > self._count  # as _has_others
        return held + [p for _, p in self._others()] if others else held

    def device_inputs(self) -> list[Tensor]:
        """The parameters, stacked where they are one tensor each and lie so."""
        tensors: list[Tensor] = []
        for name, split in self.per_group.items():
            values = self._group(name).values() if split else self.one_parameter(name)
            tensors += (values,) if isinstance(values, Tensor) else values
        return [*tensors, *self.quantized_buffers()] if self.is_quantized else tensors

    def quantized_buffers(self) -> list[Tensor]:
        """The scales of a weight that stays quantised, and the amaxes of its groups, where these have scales."""
        return [buffer for name in (SCALES, AMAX) if (buffer := self._buffers.get(name)) is not None]

    def _has_stand_ins(self, name: str) -> bool:
        """Whether what autograd is given is no gradient, but a sign that it lies elsewhere."""
        return False

    def _now(self, name: str) -> tuple[nn.Parameter, ...]:
        """The parameters of the groups, as they are now."""
        try:
            return _getter(name, self.num_groups)(self._parameters)
        except KeyError:  # not registered as such: a replica, a parametrization
            return tuple([getattr(self, n) for n in _names(name, self.num_groups)])

    def _group(self, name: str) -> ExpertGroup:
        """The parameters of the groups, and what is known of them."""
        groups = self._groups
        if name in groups:
            group = groups[name]
            if has_objects(self._parameters, _names(name, self.num_groups), group.tensors):
                return group
            if group.holds(parameters := self._now(name)):  # replicas share them
                return group
        else:
            parameters = self._now(name)
        group = groups[name] = ExpertGroup(parameters)
        return group

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._groups.clear()  # so that a parameter is freed now, and not at the next call

    def _has_others(self) -> bool:
        replaced = self._forward_pre_hooks  # which may put parameters in the place of others
        return bool(self._modules or replaced) or len(self._parameters) > self._count

    def _others(self) -> Iterable[tuple[str, Tensor]]:
        """What is registered besides the parameters of the groups."""
        of_groups = {n for name in self.per_group for n in self.parameter_names(name)}
        return [(name, p) for name, p in self._named() if name not in of_groups]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``.to()`` and its kin: what they scatter is put into one storage again."""
        self._groups.clear()
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._gather()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """By the state, as any module is copied; a parametrization would have each attribute copied as it is."""
        copy = memo[id(self)] = object.__new__(type(self))
        state: Any = type_before_parametrizations(self).__getstate__
        copy.__setstate__(deepcopy(state(self), memo))
        return copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        """So are the parts of a copy or a pickle."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._gather()

    def _gather(self) -> None:
        for name in (name for name, split in self.per_group.items() if split):
            if not self._parameters.keys() >= set(self.parameter_names(name)):
                continue  # some of them are computed
            parameters = self.expert_parameters(name)
            if not parameters[0].is_meta and as_one(parameters) is None:
                for parameter, part in zip(parameters, torch.stack([p.data for p in parameters]), strict=True):
                    parameter.data = part

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_note(state_dict, prefix, args[-1])
        self._groups.clear()
        for name, split in self.per_group.items():
            one, many = f"{prefix}{name}", [f"{prefix}{name}{i}" for i in range(self.num_groups)]
            error_messages = args[-1]
            error_messages += _unreadable(state_dict, [one] if split else many)
            if split and one in state_dict and _is_stacked(state_dict[one], self.num_groups):
                state_dict.update(zip(many, state_dict.pop(one), strict=True))
            elif not split and one not in state_dict and _are_alike([state_dict.get(key) for key in many]):
                state_dict[one] = torch.stack([state_dict.pop(key) for key in many])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Parameters(NamedTuple):
    """Parameters of an op that autograd saves one by one.

    Attributes:
        turned: whether the matrices are their transposed views.
        shape: of each in the forward, as is ``dtype``.
    """

    op: ExpertParameters
    name: str
    turned: bool
    number: int
    shape: torch.Size
    dtype: torch.dtype

    def tensors(self) -> Sequence[Tensor]:
        """Those that the call has found the op to have."""
        op, name = self.op, self.name
        if not op.per_group[name]:
            return (op.one_parameter(name),)
        group = op._groups.get(name)
        return (op._group(name) if group is None else group).tensors

    def joined(self, tensors: Sequence[Tensor]) -> Matrices:
        """As matrices, once it is clear that they have the form that the forward read."""
        groups, sample = self.op._groups, tensors[0]
        values = groups[self.name].same(tensors) if self.name in groups else None
        if values is None:
            values = self.op.saved_values(self.name, tensors)
        if sample.shape != self.shape or sample.dtype != self.dtype:
            raise RuntimeError(
                f"{type(self.op).__name__}: {self.name} of a group was {list(self.shape)}, {self.dtype} in the forward "
                f"and is {list(sample.shape)}, {sample.dtype} in the backward; its .data was replaced in between"
            )
        return _upright(values) if self.turned else values


def _upright(values: Matrices) -> Matrices:
    """The transposed views."""
    return values.mT if isinstance(values, Tensor) else tuple(value.mT for value in values)


def _misfit(name: str, tensors: Sequence[Tensor]) -> str | None:
    """What of the groups' tensors is not like the first; None if they are all."""
    kinds = [(list(p.shape), p.dtype, p.device) for p in tensors]
    other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return None
    return (
        f"{name}{other}: expected shape {kinds[0][0]}, {kinds[0][1]} on {kinds[0][2]}, like {name}0, "
        f"got {kinds[other][0]}, {kinds[other][1]} on {kinds[other][2]}"
    )


def _unreadable(state_dict: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """A line for what stands under a key of the other form and is no tensor; torch says so of its own keys alone."""
    values = [(key, state_dict[key]) for key in keys if key in state_dict]
    return [f"{key}: expected a tensor, got a {type(v).__name__}" for key, v in values if not isinstance(v, Tensor)]


def _is_stacked(value: Any, groups: int) -> bool:
    """Whether it holds a tensor for each group."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == groups


def _are_alike(tensors: list[Any]) -> bool:
    """Whether all are there, in one shape."""
    shapes = {tensor.shape if isinstance(tensor, Tensor) else None for tensor in tensors}
    return len(shapes) == 1 and None not in shapes


@cache
def _names(name: str, groups: int) -> tuple[str, ...]:
    return tuple([f"{name}{i}" for i in range(groups)])


@cache
def _getter(name: str, groups: int) -> Callable[[Any], tuple[nn.Parameter, ...]]:
    """Looks all of them up in a dictionary."""
    names = _names(name, groups)
    return itemgetter(*names) if groups > 1 else lambda parameters: (parameters[names[0]],)
