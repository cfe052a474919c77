"""The experts of a transformers model with low-rank adapters, run by a container on the parameters of both.

For one call, the owner of the adapters lends them to the experts module (:func:`lent`), whose forward then runs
:func:`experts_forward`. The weights are read in place, and no tensor of a weight's size is allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...fuser import Sequential
from ...fuser.explain.model import LayerContainer
from ...ops import GroupedLoRA
from ...ops.formats.copies import AMAX, SCALES
from ...ops.kernels.doors.routing import routed_by
from ...ops.modules.quantize import hold
from .experts import ModuleParameters, Names, _key, autocasts, layer_around, refusal
from .gates import ModelExperts
from .stored_experts import Stored, both_stored, float8_blocks, stored_of

ATTRIBUTE = "_fusible_lora"  # of the module, where neither its children nor its state_dict show it
_ALIGNED = 16  # bytes in a row of a matrix that the CUDA kernels read


class Adapter(NamedTuple):
    """The adapter of one parameter, to which ``lora_b`` [E, out, R] times ``lora_a`` [E, R, in] is added."""

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, parts: Sequence[Adapter]) -> Adapter:
        """Joins several adapters into one: ranks add up, and are padded with zeros to a rank that kernels read."""
        a, b = torch.cat([part.a for part in parts], 1), torch.cat([part.b for part in parts], 2)
        missing = -a.shape[1] % (_ALIGNED // a.itemsize)
        if missing and a.itemsize == 2:
            a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
        return cls(a.contiguous(), b.contiguous())


class AdaptedExperts:
    """The adapters of an experts module and the container that runs them. Deep copies and pickles leave it out.

    Attributes:
        adapters: the adapters of the current call, by parameter name.
        routing: the backend that routed the last call.
    """

    def __init__(self, experts: ModelExperts) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.routing = ""
        self._experts = weakref.ref(experts)
        self._container = Sequential()
        self._key: tuple[object, ...] = ()
        self._last: _Last | None = None

    def belongs_to(self, experts: ModelExperts) -> bool:
        """Whether ``experts`` is the module of these adapters; false if a copied module shares the attribute."""
        return self._experts() is experts

    def run(self, experts: ModelExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Runs the experts: [T, H] in the dtype of the weights. The container then drops the tensors of the call."""
        parameters, names = ModuleParameters.of(experts), Names.of(experts)
        adapters = [self.adapters.get(name) for name in (names.up, names.down)]
        ranks = tuple([0 if adapter is None else adapter.a.shape[1] for adapter in adapters])
        stored = _stored(experts)
        key = _key(experts, parameters), ranks, [None if each is None else each[:2] for each in stored]
        if key != self._key:
            self._container, self._key = _build(experts, parameters, stored, *ranks), key
        groups = parameters.up.shape[0]
        self.routing = routed_by(index.dtype, x.device, groups, index.numel(), x.dtype)
        self._put(parameters, _decoders(experts, stored), [adapter or (None, None) for adapter in adapters])
        try:
            y: Tensor = self._container(x, top_k_index=index, top_k_weights=weights)
            return y
        finally:
            self._let_go(x.device)

    def explained(self, experts: ModelExperts) -> LayerContainer | None:
        """The container for ``fusible.explain``, on tensors like those of the last call; None if there was none."""
        if self._last is None:
            return None
        device, like = self._last
        factors = [_like(factor, device) for factor in like]
        decoders = _decoders(experts, _stored(experts))
        self._put(ModuleParameters.of(experts), decoders, [factors[:2], factors[2:]])
        return LayerContainer(self._container, self.routing)

    def _put(
        self,
        parameters: ModuleParameters,
        decoders: Sequence[Sequence[Tensor]],
        factors: Sequence[Sequence[Tensor | None]],
    ) -> None:
        """Puts tensors in the place of parameters and of the scales of bytes; they need not be ``nn.Parameter``."""
        for (held, buffers), weight, bias, decoding, (lora_a, lora_b) in zip(
            self._linears(), parameters[:2], parameters[2:], decoders, factors, strict=True
        ):
            if decoding:
                weight = nn.Parameter(weight.detach(), requires_grad=False)  # transformers' own FP8 weights ask for it
            named = {"weight": weight, "bias": bias, "lora_a": lora_a, "lora_b": lora_b}
            held.update({name: tensor for name, tensor in named.items() if tensor is not None})
            buffers.update(zip((SCALES, AMAX), decoding, strict=False))

    def _let_go(self, device: torch.device) -> None:
        """Drops the tensors; keeps the container's structure and which adapters are trained."""
        for linear in self._linears():
            for held in linear:
                held.update({name: _like(tensor, "meta") for name, tensor in held.items()})
        names = "lora_a", "lora_b"
        self._last = _Last(device, tuple([held.get(n) for held, _ in self._linears() for n in names]))

    def _linears(self) -> list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]]:
        """The parameters of both linears, and their buffers."""
        linears = [vars(self._container._modules[name]) for name in ("fc1", "fc2")]
        return [(linear["_parameters"], linear["_buffers"]) for linear in linears]

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return (type(None), ())


class _Last(NamedTuple):
    """The device of the last call, and tensors without data like the two factors of each adapter."""

    device: torch.device
    factors: tuple[Tensor | None, ...]


def _like(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    if tensor is None:
        return None
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)


@contextmanager
def lent(experts: ModelExperts, name: str, adapter: Adapter) -> Iterator[None]:
    """A context in which the forward of the experts adds the adapter to the named parameter."""
    layer: AdaptedExperts | None = experts.__dict__.get(ATTRIBUTE)
    if layer is None or not layer.belongs_to(experts):
        layer = experts.__dict__[ATTRIBUTE] = AdaptedExperts(experts)
    layer.adapters[name] = adapter
    try:
        yield
    finally:
        del layer.adapters[name]


def takes(experts: ModelExperts, name: str) -> bool:
    """Whether this parameter of an experts module can be adapted here without a conversion."""
    if name not in Names.of(experts)[:2]:
        return False
    return both_stored(experts) or refusal(experts, ModuleParameters.of(experts)) is None


def experts_forward(experts: ModelExperts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor | None:
    """Runs the experts with the adapters that are lent now.

    Args and result: x [T, H], ids and weights [T, k] to [T, H]; None if no adapter is lent. After a call without
    adapters ``fusible.explain`` describes that call.
    """
    layer: AdaptedExperts = experts.__dict__[ATTRIBUTE]
    if not layer.belongs_to(experts) or not layer.adapters:
        experts.__dict__[ATTRIBUTE] = None
        return None
    if both_stored(experts):
        return _run_stored(layer, experts, x, top_k_index, top_k_weights)
    rows = x if autocasts(x) else x.to(getattr(experts, Names.of(experts).up).dtype)
    return layer.run(experts, rows, top_k_index, top_k_weights).to(x.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def stored_forward(experts: ModelExperts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """:func:`experts_forward` of experts that are bytes, with the adapters that are lent now or without any.

    Compiled code breaks its graph for it: else a compiler would see the adapters as they are lent, and keep them.
    """
    layer: AdaptedExperts | None = experts.__dict__.get(ATTRIBUTE)
    if layer is None or not layer.belongs_to(experts):
        layer = experts.__dict__[ATTRIBUTE] = AdaptedExperts(experts)
    return _run_stored(layer, experts, x, top_k_index, top_k_weights)


def _run_stored(layer: AdaptedExperts, experts: ModelExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """In the dtype of the rows if products with the bytes read it, else in bfloat16."""
    read = (torch.bfloat16, torch.float16) if float8_blocks(experts) else (torch.bfloat16, torch.float32, torch.float64)
    rows = x if x.dtype in read or autocasts(x) else x.bfloat16()
    return layer.run(experts, rows, index, weights).to(x.dtype)


def explained(experts: ModelExperts) -> LayerContainer | None:
    """The container for ``fusible.explain`` if the last call had adapters, else None."""
    layer: AdaptedExperts | None = experts.__dict__.get(ATTRIBUTE)
    return None if layer is None else layer.explained(experts)


def _stored(experts: ModelExperts) -> list[Stored | None]:
    """The meaning of the bytes of both weights; None for a weight in 16 bits."""
    return [stored_of(experts, name) for name in Names.of(experts)[:2]]


def _decoders(experts: ModelExperts, stored: Sequence[Stored | None]) -> list[tuple[Tensor, ...]]:
    """The scales of both weights, and what is beside them."""
    return [() if each is None else each.weight(experts).decoders for each in stored]


def _build(
    experts: ModelExperts, parameters: ModuleParameters, stored: Sequence[Stored | None], up_rank: int, down_rank: int
) -> Sequential:
    fc1 = _linear(experts, parameters.up, parameters.up_bias, stored[0], up_rank)
    fc2 = _linear(experts, parameters.down, parameters.down_bias, stored[1], down_rank)
    return layer_around(experts, fc1, fc2)


def _linear(
    experts: ModelExperts, weight: Tensor, bias: Tensor | None, stored: Stored | None, rank: int
) -> GroupedLoRA:
    if stored is not None:
        groups, rows, columns = stored.shape
        linear = GroupedLoRA(groups, columns, rows, rank, bias=bias is not None, device="meta", dtype=stored.dtype)
        return hold(linear, stored.recipe)
    groups, rows, columns = weight.shape
    transposed = experts.is_transposed
    sizes = (rows, columns) if transposed else (columns, rows)
    options = {"bias": bias is not None, "transposed_weight": transposed}
    return GroupedLoRA(groups, *sizes, rank, device="meta", dtype=weight.dtype, **options)
