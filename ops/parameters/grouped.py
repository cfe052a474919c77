"""Parameters of groups: one stacked tensor, or one tensor per group, all views of one storage if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ...fuser import ArgumentError, Op
from ...fuser.contract.tracing import WITHOUT_DATA
from ...fuser.runtime.residuals import Apart
from ..formats.copies import AMAX, SCALES
from ..kernels import has_objects
from ..kernels.problems.gemm import Matrices
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
        """Initialises the state; call it before adding parameters."""
        self.per_group, self._groups, self._count = {}, {}, 0

    def add_expert_parameter(self, name: str, data: Tensor, single: bool) -> None:
        """Registers ``data`` [E, ...] as one parameter, or as one per group."""
        self.per_group[name] = not single
        self._count += 1 if single else self.num_groups
        if single:
            self.register_parameter(name, nn.Parameter(data))
        for full_name, part in () if single else zip(_names(name, self.num_groups), data, strict=True):
            self.register_parameter(full_name, nn.Parameter(part))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter; assignment ends up here too.

        Drops cached facts, which would keep a replaced parameter alive.
        """
        super().register_parameter(name, param)
        for key, group in [*self._groups.items()]:
            number = name.removeprefix(key)
            if name == key or not number.isdecimal() or type(param) not in (nn.Parameter, type(None)):
                continue  # something else, or what FSDP puts there while it keeps the others
            if not any(tensor is param for tensor in group.tensors[int(number) :][:1]):
                del self._groups[key]

    @property
    def column_dims(self) -> dict[str, int | None]:
        """The dimension of each parameter, from the end, that has the columns of the output; None if it has none."""
        return {"weight": -1 if self.transposed_weight else -2, "bias": -1, "lora_a": None, "lora_b": -2}

    def parameter_names(self, name: str) -> list[str]:
        """The registered names of an expert parameter, in group order."""
        return list(_names(name, self.num_groups)) if self.per_group[name] else [name]

    def expert_parameters(self, name: str) -> list[nn.Parameter]:
        """The current parameters, in group order."""
        return list(self._now(name)) if self.per_group[name] else [self.one_parameter(name)]

    def one_parameter(self, name: str) -> nn.Parameter:
        """The single parameter, or the first group's; all have its shape, dtype and device."""
        name = f"{name}0" if self.per_group[name] else name
        parameter = self._parameters.get(name)
        if parameter is None and (parameter := getattr(self, name)) is None:
            raise ArgumentError(f"{type(self).__name__}: {name} is None; build the op without it")
        return parameter

    def check_parameters(self, device: torch.device | None, **shapes: tuple[int, ...]) -> None:
        """Checks the current parameters, which a user may have replaced; shapes are those of one group.

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
        """The values of all groups without a copy: stacked if contiguous, else one by one; cast if ``dtype`` differs.

        A weight is [E, N, K] in any storage layout.
        """
        values: Matrices = self._values(name, self._group(name)) if self.per_group[name] else self.one_parameter(name)
        one = values if isinstance(values, Tensor) else values[0]
        if dtype is not None and one.dtype != dtype:
            values = values.to(dtype) if isinstance(values, Tensor) else tuple(value.to(dtype) for value in values)
        return _upright(values) if name == "weight" and self.transposed_weight else values

    def to_save(self, name: str, values: Matrices) -> Any:
        """The form in which a ``Saved`` keeps :meth:`matrices` of this call: the parameters, unless the values are a
        copy.

        Autograd then checks each version counter, and saved-tensor hooks see the parameters, not views of them.
        """
        parameters = self._now(name) if self.per_group[name] else (self.one_parameter(name),)
        sample, value = parameters[0], values if isinstance(values, Tensor) else values[0]
        if value.dtype != sample.dtype or isinstance(sample, WITHOUT_DATA):
            return values
        turned = name == "weight" and self.transposed_weight
        return Apart(_Parameters(self, name, turned, len(parameters), sample.shape, sample.dtype), parameters)

    def saved_values(self, name: str, parameters: Sequence[Tensor]) -> Matrices:
        """The values of parameters that a forward saved, in their stored layout.

        The op's parameters may have changed since.
        """
        if not self.per_group[name]:
            return parameters[0]
        group = self._groups.get(name)
        if group is None or not group.holds(parameters):
            group = ExpertGroup(tuple(parameters))
        return self._values(name, group)

    def _values(self, name: str, group: ExpertGroup) -> Matrices:
        """The values of a group; contiguous tensors have been found to be uniform."""
        values = group.values()
        if not isinstance(values, Tensor) and not group.is_uniform():  # one was given other memory since the check
            raise ArgumentError(f"{type(self).__name__}: {_misfit(name, group.tensors)}")
        return values

    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs: one common name for all groups of a parameter, and the names of other parameters."""
        return (*self.per_group, *[name for name, _ in self._others()])

    def input_tensors(self) -> list[Tensor]:
        """The input tensors: a parameter, or the tensor that stands for the parameters of all groups."""
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
        """The parameters, stacked if there is one tensor per group and they are contiguous."""
        tensors: list[Tensor] = []
        for name, split in self.per_group.items():
            values = self._group(name).values() if split else self.one_parameter(name)
            tensors += (values,) if isinstance(values, Tensor) else values
        return [*tensors, *self.quantized_buffers()] if self.is_quantized else tensors

    def forms(self) -> tuple[object, ...]:
        """The facts on the groups' tensors that checks and fusions read; part of the key of the plan cache."""
        forms: list[object] = []
        for name, split in self.per_group.items():
            group = self._group(name) if split else None
            p = self.one_parameter(name) if group is None else group.tensors[0]
            is_uniform = group is None or group.is_uniform()
            forms += (type(p), p.dtype, p.device, p.layout, p.requires_grad, p.shape, is_uniform)
        for name in (SCALES, AMAX) if self.is_quantized else ():
            buffer = self._buffers.get(name)
            forms += (None,) if buffer is None else (buffer.dtype, buffer.device, buffer.shape)
        return tuple(forms)

    def quantized_buffers(self) -> list[Tensor]:
        """The scales of a weight that stays quantised, and the amaxes of its groups if they have scales."""
        return [buffer for name in (SCALES, AMAX) if (buffer := self._buffers.get(name)) is not None]

    def _has_stand_ins(self, name: str) -> bool:
        """Whether autograd gets a marker instead of a gradient, because the gradient is elsewhere."""
        return False

    def _now(self, name: str) -> tuple[nn.Parameter, ...]:
        """The current parameters of the groups."""
        try:
            return _getter(name, self.num_groups)(self._parameters)
        except KeyError:  # not registered as such: a replica, a parametrization
            return tuple([getattr(self, n) for n in _names(name, self.num_groups)])

    def _group(self, name: str) -> ExpertGroup:
        """The current parameters of the groups, with the facts known of them."""
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
        """The parameters that do not belong to groups, by name."""
        of_groups = {n for name in self.per_group for n in self.parameter_names(name)}
        return [(name, p) for name, p in self._named() if name not in of_groups]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies ``.to()`` and the like, then gathers the parameters into one storage again."""
        self._groups.clear()
        result: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._gather()
        return result

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_groups": {}}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copies by the module's state, like any module; a parametrization would copy each attribute separately."""
        copy = memo[id(self)] = object.__new__(type(self))
        kind: type[ExpertParameters] = type_before_parametrizations(self)
        copy.__setstate__(deepcopy(kind.__getstate__(self), memo))
        return copy

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restores a copy or a pickle, and gathers its parameters into one storage."""
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
    """The parameters of an op, saved by autograd one by one.

    Attributes:
        turned: whether the matrices are transposed views of them.
        shape: the shape of each in the forward; ``dtype`` likewise.
    """

    op: ExpertParameters
    name: str
    turned: bool
    number: int
    shape: torch.Size
    dtype: torch.dtype

    def tensors(self) -> Sequence[Tensor]:
        """The op's parameters that the call has found."""
        op, name = self.op, self.name
        if not op.per_group[name]:
            return (op.one_parameter(name),)
        group = op._groups.get(name)
        return (op._group(name) if group is None else group).tensors

    def joined(self, tensors: Sequence[Tensor]) -> Matrices:
        """The saved parameters as matrices, after a check that they still have the form that the forward read."""
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
    """Undoes the transposition."""
    return values.mT if isinstance(values, Tensor) else tuple(value.mT for value in values)


def _misfit(name: str, tensors: Sequence[Tensor]) -> str | None:
    """An error text on the first tensor unlike the first group's; None if all are alike."""
    kinds = [(list(p.shape), p.dtype, p.device) for p in tensors]
    other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return None
    return (
        f"{name}{other}: expected shape {kinds[0][0]}, {kinds[0][1]} on {kinds[0][2]}, like {name}0, "
        f"got {kinds[other][0]}, {kinds[other][1]} on {kinds[other][2]}"
    )


def _unreadable(state_dict: dict[str, object], keys: Sequence[str]) -> list[str]:
    """The errors for keys of the other form that hold no tensor; torch reports only its own keys."""
    values = [(key, state_dict[key]) for key in keys if key in state_dict]
    return [f"{key}: expected a tensor, got a {type(v).__name__}" for key, v in values if not isinstance(v, Tensor)]


def _is_stacked(value: object, groups: int) -> bool:
    """Whether it holds one tensor for each group."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == groups


def _are_alike(tensors: list[object]) -> bool:
    """Whether all tensors exist and have the same shape."""
    shapes = {tensor.shape if isinstance(tensor, Tensor) else None for tensor in tensors}
    return len(shapes) == 1 and None not in shapes


@cache
def _names(name: str, groups: int) -> tuple[str, ...]:
    return tuple([f"{name}{i}" for i in range(groups)])


@cache
def _getter(name: str, groups: int) -> Callable[[Mapping[str, Any]], tuple[nn.Parameter, ...]]:
    """Returns a function that looks up all these names in a dictionary."""
    names = _names(name, groups)
    return itemgetter(*names) if groups > 1 else lambda parameters: (parameters[names[0]],)
