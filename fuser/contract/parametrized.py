"""Ops with parameters computed by parametrizations or hooks: a view holds the values for one run.

A parametrization (``torch.nn.utils.parametrize``) computes whenever the parameter is read, so a run reads it once.
``torch.nn.utils.prune``, ``weight_norm`` and ``spectral_norm`` compute in a hook, before the op is called: the value is
then a plain attribute, and the parameters are ``weight_orig``, or ``weight_g`` and ``weight_v``, which no op reads.

A view is an object of the op's class that shares all of its attributes except the computed parameters, for which it has
tensors of its own. All code that checks, runs or describes an op reads a view. So values are computed once, and threads
do not see one another's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .op import Op
from .spec import TensorSpec
from .tracing import Outline

AnyOp = TypeVar("AnyOp", bound=Op)
_SUFFIXES = ("orig", "g", "v")  # of what hooks of ``torch.nn.utils`` compute a parameter from


def computes_parameters(op: Op) -> bool:
    """Whether some of the parameters that the op, or a part of it, reads are computed."""
    if not (op._modules or op._forward_pre_hooks):
        return False
    return bool(_lists(op) or _hooked(op)) or any([computes_parameters(p) for p in op.inner_ops().values()])


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
    """A view with the forms of the values that will be computed, without computing them; the op itself if it has no
    computed parameters.
    """
    if not computes_parameters(op):
        return op
    return view_of(op, lambda part, name: _outline(part, name, foreseen_spec(part, name)))


def is_certain(op: Op) -> bool:
    """Whether what will be computed is certainly of the forms that are foreseen: torch has seen to it."""
    return all(map(_keeps_form, _lists(op).values())) and all(map(is_certain, op.inner_ops().values()))


def foreseen_spec(op: Op, name: str) -> TensorSpec:
    """The spec of a parameter that will be computed: that of its source, or of the largest of several sources."""
    computing = _lists(op).get(name)
    if computing is None:
        like, sources = vars(op)[name], [op._parameters[original] for original in _hooked(op)[name]]
        return _spec_like(like, sources)
    names = ["original"] if computing.is_tensor else [f"original{i}" for i in range(computing.ntensors)]
    originals = [t for name in names if isinstance(t := getattr(computing, name), Tensor)]
    like = max(originals, key=Tensor.numel, default=torch.empty(0, device="cpu"))
    return _spec_like(like, [*originals, *computing.parameters()])


def _spec_like(like: Tensor, sources: Sequence[Tensor | None]) -> TensorSpec:
    """The spec of a tensor that requires a gradient if one of its sources does."""
    trains = like.is_floating_point() and any([t is not None and t.requires_grad for t in sources])
    return TensorSpec(tuple(like.shape), like.dtype, like.device, requires_grad=trains)


def _keeps_form(computing: ParametrizationList) -> bool:
    return computing.is_tensor and not computing.unsafe and not any([hasattr(m, "right_inverse") for m in computing])


def view_of(op: AnyOp, value: Callable[[Op, str], Tensor]) -> AnyOp:
    """A view of the op, and of its parts, with ``value(op, name)`` for each parameter that is computed."""
    hooked = _hooked(op)
    values = {name: value(op, name) for name in (*_lists(op), *hooked)}
    inner = op.inner_ops()
    parts = {role: view_of(part, value) for role, part in inner.items()}
    if not values and all([parts[role] is part for role, part in inner.items()]):
        return op
    modules = {name: parts.get(name, m) for name, m in op._modules.items() if name != "parametrizations"}
    unread = {original for originals in hooked.values() for original in originals}
    parameters = {name: parameter for name, parameter in op._parameters.items() if name not in unread}
    held = {"_parameters": parameters | values, "_modules": modules, "_computed": tuple(values)}
    held |= {name: type(vars(op)[name])() for name in op.caches} | values | parts | {"_outline": None}
    view: AnyOp = object.__new__(_view_class(type(op), tuple(held)))
    object.__setattr__(view, "__dict__", op.__dict__)
    for name, tensor in held.items():
        object.__setattr__(view, name, tensor)
    return view


@lru_cache(maxsize=1024)
def _view_class(cls: type[AnyOp], slots: tuple[str, ...]) -> type[AnyOp]:
    """A subclass whose objects have these attributes of their own, and get the others elsewhere."""
    return type(cls.__name__, (cls,), {"__slots__": slots, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _lists(op: Op) -> dict[str, ParametrizationList]:
    """The parametrization of each parameter of the op that has one."""
    lists = op._modules.get("parametrizations")
    named = lists.items() if isinstance(lists, nn.ModuleDict) else ()
    return {name: each for name, each in named if isinstance(each, ParametrizationList)}


def _hooked(op: Op) -> dict[str, list[str]]:
    """For each parameter that a hook computes, the names of its sources."""
    originals: dict[str, list[str]] = {}
    for original in op._parameters if op._forward_pre_hooks else ():
        name, _, suffix = original.rpartition("_")
        if suffix in _SUFFIXES and isinstance(vars(op).get(name), Tensor):
            originals.setdefault(name, []).append(original)
    return originals


def _outline(op: Op, name: str, spec: TensorSpec) -> Tensor:
    why = (
        f"{type(op).__name__}: the values of {name} are computed when fwd runs, and they are there for fwd "
        "alone; what bwd needs of them, fwd must return"
    )
    return Outline(spec, why)
