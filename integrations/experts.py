"""The experts of a transformers model as a container of ours, on the parameters that the model owns."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..fuser import Sequential
from ..fuser.facts import constant
from ..ops import GLU, Activation, GroupedLinear, Scale
from ..ops.checks import is_plain
from .gates import activation_of
from .routed_layer import RoutedLayer

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
CONSTANTS = ("limit", "alpha", "swiglu_limit", "swiglu_alpha")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Names(NamedTuple):
    """What the parameters of an experts module are called; a bias that is not there is None."""

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None

    @classmethod
    def of(cls, experts: Any) -> Names:
        up, down = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
        return cls(up, down, f"{up}_bias", f"{down}_bias") if experts.has_bias else cls(up, down, None, None)


class Parameters(NamedTuple):
    """The parameters themselves, as they are at a call."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def of(cls, experts: Any) -> Parameters:
        return cls(*(None if name is None else getattr(experts, name) for name in Names.of(experts)))  # type: ignore[arg-type]


class OwnStep(nn.Module):
    """Runs a method or a child of the model's module where we have no op for it. Holds the module weakly."""

    def __init__(self, experts: nn.Module, name: str, reason: str = "") -> None:
        super().__init__()
        self._experts, self._name, self.reason = weakref.ref(experts), name, reason

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self._experts(), self._name)(x)
        return y

    def extra_repr(self) -> str:
        return ": ".join(filter(None, (self._name, self.reason)))


class Built:
    """A container, and what it was built for. It is left out of copies and pickles, which build their own.

    Attributes:
        routed: what runs all of the layer as one function; None where a step is the model's own.
        parameters: those of the last call.
        routing: whose kernels routed the last call that was explained.
    """

    def __init__(self, container: Sequential, key: tuple[Any, ...], transposed: bool) -> None:
        self.container, self.key, gate = container, key, container._modules["act"]
        known = isinstance(gate, (GLU, Activation)) and len(container) == 4
        self.routed = RoutedLayer(container, gate.spec, transposed) if known else None  # type: ignore[arg-type]
        self.parameters = Parameters(*[torch.empty(0)] * 4)
        self.routing = ""
        self._known: list[tuple[str, Any, torch.dtype, torch.Size]] = []
        self._facts: tuple[Any, ...] = ()

    def remember(self, experts: Any, parameters: Parameters) -> None:
        """That all this holds for the experts with these parameters."""
        named = zip(Names.of(experts), parameters, strict=True)
        self.parameters = parameters
        self._known = [(n, t, t.dtype, t.shape) for n, t in named if n is not None and t is not None]
        self._facts = _facts(experts)

    def holds_for(self, experts: Any) -> bool:
        """Whether nothing has changed since; what costs a hot call one look at each tensor and constant."""
        parameters = experts.__dict__["_parameters"]
        for name, known, dtype, shape in self._known:
            tensor = parameters.get(name)
            if tensor is not known or known.dtype != dtype or known.shape != shape:
                return False
        return self._facts == _facts(experts)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (type(None), ())


_PLACE = "_fusible_built"  # among the attributes of the module, where neither its children nor its state_dict show it


def refusal(experts: Any) -> str | None:
    """Why the parameters cannot be read as they are; None: they can."""
    for name in Names.of(experts):
        if name is not None:
            tensor = getattr(experts, name, None)
            why = _unreadable(type(tensor), getattr(tensor, "dtype", None))
            if why is not None:
                return f"{name} is {why}"
    return None


@constant
def _unreadable(kind: type, dtype: torch.dtype | None) -> str | None:
    """Why no parameter of a class and dtype can be read; None: it can. Compiled code guards on these two."""
    if not issubclass(kind, Tensor):
        return "missing" if kind is type(None) else f"a {kind.__name__}"
    if not is_plain(kind):
        return f"a {kind.__name__}, a tensor subclass with operations of its own"
    return None if dtype in _DTYPES else str(dtype).removeprefix("torch.")


def container_of(experts: nn.Module) -> Sequential:
    """The container of the experts, its linears on the parameters of now.

    The parameters stay the model's: gradients arrive there, nothing is copied, and no state_dict shows the container.
    """
    return built_of(experts).container


def built_of(experts: Any) -> Built:
    """The container of the experts, and what else was built, for the parameters of now."""
    parameters = Parameters.of(experts)
    key = _key(experts, parameters)
    built = experts.__dict__.get(_PLACE)
    if built is None or built.key != key:
        built = experts.__dict__[_PLACE] = Built(_build(experts, parameters), key, experts.is_transposed)
    built.remember(experts, parameters)
    fc1, fc2 = built.container._modules["fc1"], built.container._modules["fc2"]
    _lend(fc1, parameters.up, parameters.up_bias)
    _lend(fc2, parameters.down, parameters.down_bias)
    found: Built = built
    return found


def existing(experts: nn.Module) -> Built | None:
    """What has run the experts, ready to explain the last call; None if there was no call yet."""
    built: Built | None = experts.__dict__.get(_PLACE)
    if built is not None and built.routed is not None:
        built.routing = built.routed.explain_last() or built.routing
    return built


def _key(experts: Any, parameters: Parameters) -> tuple[Any, ...]:
    """What the container depends on; everything else is looked up at every call."""
    shapes = parameters.up.shape, parameters.down.shape, parameters.up_bias is None
    return (*shapes, *_facts(experts))


def _facts(experts: Any) -> tuple[Any, ...]:
    """Of the key, what is no parameter's."""
    own = experts.__dict__
    act = own["_modules"].get("act_fn") or own.get("act_fn") or getattr(experts, "act_fn", None)
    gate = getattr(type(experts), "_apply_gate", None)
    return (*map(own.get, _FLAGS), *map(own.get, CONSTANTS), gate, act)


def known(experts: Any) -> Built | None:
    """What was built for the experts, if it still holds."""
    built = experts.__dict__.get(_PLACE)
    return built if built is not None and built.holds_for(experts) else None


def _build(experts: Any, parameters: Parameters) -> Sequential:
    op, reason = activation_of(experts)
    gate = op or OwnStep(experts, "_apply_gate" if experts.has_gate else "act_fn", reason)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    norm = {"norm": OwnStep(experts, "post_expert_norm")} if has_norm else {}
    fc1, fc2 = (_linear(experts, *pair) for pair in (parameters[::2], parameters[1::2]))
    return Sequential(OrderedDict(fc1=fc1, act=gate, fc2=fc2, **norm, scale=Scale()))


def _linear(experts: Any, weight: Tensor, bias: Tensor | None) -> GroupedLinear:
    groups, rows, columns = weight.shape
    sizes = (rows, columns) if experts.is_transposed else (columns, rows)
    how = {"bias": bias is not None, "transposed_weight": experts.is_transposed}
    return GroupedLinear(groups, *sizes, device="meta", dtype=weight.dtype, **how)


def _lend(linear: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Puts tensors in the place of parameters: also such as are none, from a parametrization."""
    linear._parameters["weight"] = weight
    if bias is not None:
        linear._parameters["bias"] = bias


Forward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""An experts implementation: the module, hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H]."""
