"""Ops with parameters that ``torch.nn.utils.parametrize`` computes: each is computed once for a run, held by a view.

A view is an object of the op's class that shares all of its attributes but those parameters, in whose place it has
tensors of its own. Whatever checks, runs or describes an op reads a view of it: then nothing is computed again, and no
thread sees what another one has computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .op import Op
from .spec import TensorSpec
from .tracing import Outline

AnyOp = TypeVar("AnyOp", bound=Op)


def computes_parameters(op: Op) -> bool:
    """Whether a parametrization computes some of the parameters that the op, or a part of it, reads."""
    return bool(op._modules) and (bool(_lists(op)) or any([computes_parameters(p) for p in op.inner_ops().values()]))


def computed(op: AnyOp) -> AnyOp:
    """A view for one run, on values that are computed here, each once; its ``_outline`` is one without the values."""
    values: list[Tensor] = []

    def value(part: Op, name: str) -> Tensor:
        values.append(getattr(part, name))
        return values[-1]

    view = view_of(op, value)
    specs = map(TensorSpec.of, values)
    object.__setattr__(view, "_outline", view_of(op, lambda part, name: _outline(part, name, next(specs))))
    return view


def foreseen(op: AnyOp) -> AnyOp:
    """A view on the forms of what will be computed, which computes nothing; the op itself where nothing will be."""
    if not computes_parameters(op):
        return op
    return view_of(op, lambda part, name: _outline(part, name, foreseen_spec(part, name)))


def is_certain(op: Op) -> bool:
    """Whether what will be computed is certainly of the forms that are foreseen: torch has seen to it."""
    return all(map(_keeps_form, _lists(op).values())) and all(map(is_certain, op.inner_ops().values()))


def foreseen_spec(op: Op, name: str) -> TensorSpec:
    """Of a parameter that will be computed: that of what it is computed from, of the largest of several tensors."""
    computing = _lists(op)[name]
    names = ["original"] if computing.is_tensor else [f"original{i}" for i in range(computing.ntensors)]
    originals = [t for name in names if isinstance(t := getattr(computing, name), Tensor)]
    like = max(originals, key=Tensor.numel, default=torch.empty(0))
    trains = like.is_floating_point() and any([t.requires_grad for t in (*originals, *computing.parameters())])
    return TensorSpec(tuple(like.shape), like.dtype, like.device, requires_grad=trains)


def _keeps_form(computing: Any) -> bool:
    return computing.is_tensor and not computing.unsafe and not any([hasattr(m, "right_inverse") for m in computing])


def view_of(op: AnyOp, value: Callable[[Op, str], Tensor]) -> AnyOp:
    """A view of the op, and of its parts, with ``value(op, name)`` for each parameter that is computed."""
    values = {name: value(op, name) for name in _lists(op)}
    inner = op.inner_ops()
    parts = {role: view_of(part, value) for role, part in inner.items()}
    if not values and all([parts[role] is part for role, part in inner.items()]):
        return op
    modules = {name: parts.get(name, m) for name, m in op._modules.items() if name != "parametrizations"}
    held = {"_parameters": {**op._parameters, **values}, "_modules": modules, "_computed": tuple(values)}
    held |= {name: type(vars(op)[name])() for name in op.caches} | values | parts | {"_outline": None}
    view: AnyOp = object.__new__(_view_class(type(op), tuple(held)))
    object.__setattr__(view, "__dict__", op.__dict__)
    for name, tensor in held.items():
        object.__setattr__(view, name, tensor)
    return view


@lru_cache(maxsize=1024)
def _view_class(cls: type[AnyOp], slots: tuple[str, ...]) -> type[AnyOp]:
    """A class whose objects have these attributes to themselves, wherever else they get the others from."""
    return type(cls.__name__, (cls,), {"__slots__": slots, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _lists(op: Op) -> dict[str, Any]:
    """What computes which parameter of the op."""
    lists = op._modules.get("parametrizations")
    return dict(lists.items()) if isinstance(lists, nn.ModuleDict) else {}


def _outline(op: Op, name: str, spec: TensorSpec) -> Tensor:
    why = (
        f"{type(op).__name__}: a parametrization computes the values of {name} when fwd runs, and they are there for "
        "fwd alone; what bwd needs of them, fwd must return"
    )
    return Outline(spec, why)
