"""A container that runs the experts of a transformers model on the model's own parameters."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...fuser import Sequential
from ...fuser.contract.config import constant
from ...fuser.contract.overrides import is_hooked
from ...fuser.contract.stored_values import stores_values
from ...fuser.explain.explanation import StandIn
from ...ops import Combine, Dispatch, GroupedLinear, GroupedLoRA, Scale
from ...ops.kernels.doors.routing import routed_by
from .gates import ModelExperts, activation_of, names_read

ExpertsLinear = GroupedLinear | GroupedLoRA
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_names_read: Callable[[type, object], tuple[str, ...]] = cache(names_read)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Names(NamedTuple):
    """The names of the parameters of an experts module; None for a missing bias."""

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None

    @classmethod
    def of(cls, experts: ModelExperts) -> Names:
        up, down = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
        return cls(up, down, f"{up}_bias", f"{down}_bias") if experts.has_bias else cls(up, down, None, None)


class ModuleParameters(NamedTuple):
    """The current parameters of an experts module; a parametrized one is computed when it is read."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def of(cls, experts: ModelExperts) -> ModuleParameters:
        """Reads the parameters of ``experts``; a missing one is None, which :func:`refusal` reports."""
        return cls._make([None if name is None else _parameter(experts, name) for name in Names.of(experts)])


def _parameter(experts: ModelExperts, name: str) -> Tensor | None:
    try:  # Dynamo would compute it to find out whether a default is needed
        tensor: Tensor | None = getattr(experts, name)
    except AttributeError:
        return None
    return tensor


class ModelStep(StandIn):
    """Runs a method or a child of the model's module where we have no op for it. Holds the module weakly."""

    def __init__(self, experts: nn.Module, name: str, reason: str = "") -> None:
        super().__init__()
        self._experts, self._name, self.reason = weakref.ref(experts), name, reason

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self._experts(), self._name)(x)
        return y

    def extra_repr(self) -> str:
        return ": ".join(filter(None, (self._name, self.reason)))


class ExpertsContainer:
    """A container and the experts module it was built for.

    Deep copies and pickles of the module leave it out; shallow copies detect that it belongs to another module.

    Attributes:
        parameters: the parameters of the last call, if the module owns them.
        trained: which parameters of the last call required gradients, where the module does not own them.
        dtype: the dtype of the weights.
        last: dtype and device of the ids of the last call, and their shape; None before it.
    """

    def __init__(self, experts: ModelExperts, parameters: ModuleParameters, key: tuple[object, ...]) -> None:
        self.container, self.key = layer_like(experts, parameters), key
        self._experts, self.dtype = weakref.ref(experts), parameters.up.dtype
        self.parameters: ModuleParameters | None = None
        self.trained: tuple[bool, ...] = ()
        self.last: tuple[torch.dtype, torch.device, torch.Size] | None = None
        self._lent: list[tuple[str, Tensor, torch.dtype, torch.Size]] = []
        self._facts: tuple[object, ...] = ()

    @property
    def routing(self) -> str:
        """The backend that routed the last call, and why the kernels did not."""
        if self.last is None:
            return ""
        dispatch = self.container._modules["dispatch"]
        assert isinstance(dispatch, Dispatch)
        ids, device, shape = self.last
        return routed_by(ids, device, dispatch.num_experts, shape.numel(), self.dtype)

    def run(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts: [T, H] in the dtype of ``x``."""
        self.last = top_k_index.dtype, x.device, top_k_index.shape
        tokens = x if x.dtype == self.dtype or autocasts(x) else x.to(self.dtype)
        y: Tensor = self.container.forward(tokens, top_k_index=top_k_index, top_k_weights=top_k_weights)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def lend(self, experts: ModelExperts, parameters: ModuleParameters) -> None:
        """Puts the parameters into the linears, and records the experts and parameters for which this holds."""
        named = zip(Names.of(experts), parameters, strict=True)
        self.parameters = parameters
        self._lent = [(n, t, t.dtype, t.shape) for n, t in named if n is not None and t is not None]
        self._facts = _facts(experts)
        _put(self.container, parameters)

    def let_go(self, experts: ModelExperts) -> None:
        """Drops, after a call, parameters that the module computes or fetches for each call."""
        parameters = experts.__dict__["_parameters"]
        if _is_offloaded(experts) or any(parameters.get(name) is not tensor for name, tensor, *_ in self._lent):
            self.trained = tuple([t is not None and t.requires_grad for t in self.parameters or ()])
            shapes = (t if t is None else torch.empty_like(t, device="meta") for t in self.parameters or ())
            _put(self.container, ModuleParameters._make(shapes))
            self.parameters, self._lent = None, []

    def holds_for(self, experts: ModelExperts) -> bool:
        """Whether nothing has changed since the container was built: one check per tensor and constant."""
        if self.parameters is None or self._experts() is not experts:
            return False
        parameters = experts.__dict__["_parameters"]
        for name, lent, dtype, shape in self._lent:
            if name not in parameters or parameters[name] is not lent or lent.dtype != dtype or lent.shape != shape:
                return False
        return self._facts == _facts(experts)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return (type(None), ())


_ATTRIBUTE = "_fusible_built"  # of the module, where neither its children nor its state_dict show it


def refusal(experts: ModelExperts, parameters: ModuleParameters) -> str | None:
    """The reason why the parameters cannot be read directly, or None."""
    for name, tensor in zip(Names.of(experts), parameters, strict=True):
        if name is not None:
            why = _unreadable(type(tensor), getattr(tensor, "dtype", None))
            if why is not None:
                return f"{name} is {why}"
    return None


@constant
def _unreadable(kind: type, dtype: torch.dtype | None) -> str | None:
    """The reason why no parameter of this class and dtype can be read, or None. Compiled code guards on the two."""
    if not issubclass(kind, Tensor):
        return "missing" if kind is type(None) else f"a {kind.__name__}"
    if not stores_values(kind):
        return f"a {kind.__name__}, a tensor subclass with operations of its own"
    return None if dtype in _DTYPES else str(dtype).removeprefix("torch.")


def built_of(experts: ModelExperts, parameters: ModuleParameters) -> ExpertsContainer:
    """Builds the container of the experts; its linears hold the current parameters.

    The parameters stay the model's: gradients arrive there, nothing is copied, and no state_dict shows the container.
    """
    key = _key(experts, parameters)
    built: ExpertsContainer | None = experts.__dict__.get(_ATTRIBUTE)
    if built is None or built._experts() is not experts or built.key != key:
        built = experts.__dict__[_ATTRIBUTE] = ExpertsContainer(experts, parameters, key)
    built.lend(experts, parameters)
    return built


def existing(experts: ModelExperts) -> ExpertsContainer | None:
    """The container that ran the experts, ready to explain the last call; None before the first call."""
    built: ExpertsContainer | None = experts.__dict__.get(_ATTRIBUTE)
    if built is not None and built.parameters is None:  # until the next call
        now = zip(ModuleParameters.of(experts), built.trained, strict=True)  # an adapter of the call may be gone by now
        computed = [t if t is None else t.detach().requires_grad_(trained) for t, trained in now]
        built.lend(experts, ModuleParameters._make(computed))
    return built


def _key(experts: ModelExperts, parameters: ModuleParameters) -> tuple[object, ...]:
    """The key that the container depends on; everything else is looked up at every call."""
    shapes = parameters.up.shape, parameters.down.shape, parameters.up_bias is None
    return (*shapes, *_facts(experts))


def _facts(experts: ModelExperts) -> tuple[object, ...]:
    """The part of the key that does not depend on the parameters."""
    attributes, kind = experts.__dict__, type(experts)
    modules = attributes["_modules"]
    act = modules["act_fn"] if "act_fn" in modules else attributes.get("act_fn")
    act = getattr(kind, "act_fn", None) if act is None else act
    gate = attributes["_apply_gate"] if "_apply_gate" in attributes else getattr(kind, "_apply_gate", None)
    within = () if act is None else _facts_within(act)
    constants = (*map(attributes.get, _names_read(kind, gate)), *within)
    return (*map(attributes.get, _FLAGS), *constants, gate, act)


def _facts_within(act: object) -> tuple[object, ...]:
    """The hooks and constants of an activation module and of its children; empty for a function."""
    if not isinstance(act, nn.Module):
        return ()
    values = is_hooked(act), *map(act.__dict__.get, _names_read(type(act), type(act).forward))
    for child in act._modules.values():
        values = *values, child, *_facts_within(child)
    return values


def built_before(experts: ModelExperts) -> ExpertsContainer | None:
    """The container built for the experts earlier, if it is still valid."""
    built = experts.__dict__.get(_ATTRIBUTE)
    return built if built is not None and built.holds_for(experts) else None


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _is_offloaded(experts: ModelExperts) -> bool:
    """Whether accelerate fetches the parameters for a call, and puts them away after it."""
    hook = experts.__dict__.get("_hf_hook")
    return any([getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,))])


def layer_like(experts: ModelExperts, parameters: ModuleParameters) -> Sequential:
    """The container of an experts module, whose linears have the shapes and dtypes of these parameters."""
    fc1, fc2 = (_linear(experts, *pair) for pair in (parameters[::2], parameters[1::2]))
    return layer_around(experts, fc1, fc2)


def layer_around(experts: ModelExperts, fc1: ExpertsLinear, fc2: ExpertsLinear) -> Sequential:
    """The container of an experts module with these linears; reads activation or gate, and norm, off the module."""
    op, reason = activation_of(experts)
    gate = op or ModelStep(experts, "_apply_gate" if experts.has_gate else "act_fn", reason)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    norm = {"norm": ModelStep(experts, "post_expert_norm", "a norm of the model's own")} if has_norm else {}
    return layer_of(fc1, gate, fc2, **norm)


def layer_of(fc1: ExpertsLinear, act: nn.Module, fc2: ExpertsLinear, **norm: nn.Module) -> Sequential:
    """The container of a layer's experts."""
    steps = OrderedDict(dispatch=Dispatch(fc1.num_groups), fc1=fc1, act=act, fc2=fc2, **norm)
    return Sequential(OrderedDict(**steps, scale=Scale(), combine=Combine()))


def _linear(experts: ModelExperts, weight: Tensor, bias: Tensor | None) -> GroupedLinear:
    groups, rows, columns = weight.shape
    sizes = (rows, columns) if experts.is_transposed else (columns, rows)
    transposed = experts.is_transposed
    return GroupedLinear(
        groups, *sizes, bias=bias is not None, transposed_weight=transposed, device="meta", dtype=weight.dtype
    )


def parameters_in(container: Sequential, name: str) -> dict[str, Tensor | None]:
    """The parameters of a child by name, in whose place other tensors can be put."""
    parameters: dict[str, Tensor | None] = vars(container._modules[name])["_parameters"]
    return parameters


def _put(container: Sequential, parameters: ModuleParameters) -> None:
    """Puts tensors in the place of parameters; results of a parametrization, which are plain tensors, are allowed."""
    for name, weight, bias in zip(("fc1", "fc2"), parameters[:2], parameters[2:], strict=True):
        parameters_in(container, name).update({"weight": weight} if bias is None else {"weight": weight, "bias": bias})


ExpertsForward = Callable[[ModelExperts, Tensor, Tensor, Tensor], Tensor]
"""An experts implementation: the module, hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H]."""
