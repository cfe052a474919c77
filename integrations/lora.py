"""The experts of a transformers model with low-rank adapters: a container of ours on the parameters of both.

For one call, whoever has the adapters lends them to the experts module (:func:`lent`); its forward then runs
:func:`experts_forward`. The weights are read as they are. Nothing of the size of a weight is made.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..fuser import Sequential
from ..fuser.explain.model import Found
from ..ops import Combine, Dispatch, GroupedLoRA, Scale
from ..ops.routing import routed_by
from .experts import Names, OwnStep, Parameters, _key, refusal
from .gates import activation_of

_LENT = "_fusible_adapters"  # among the attributes of the module, for the length of a call
_PLACE = "_fusible_lora"
_ALIGNED = 16  # bytes in a row of a matrix that the CUDA kernels read


class Adapter(NamedTuple):
    """Of one parameter: ``lora_a`` [E, R, in] and ``lora_b`` [E, out, R], whose product is added to the matrices."""

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, parts: list[Adapter]) -> Adapter:
        """Several as one, of the sum of their ranks, filled up with zeros to rows that kernels read."""
        a, b = torch.cat([part.a for part in parts], 1), torch.cat([part.b for part in parts], 2)
        missing = -a.shape[1] % (_ALIGNED // 2) if a.shape[1] else 0
        if missing:
            a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
        return cls(a.contiguous(), b.contiguous())


class _Terms(NamedTuple):
    """A call as :meth:`Sequential.explain` needs it."""

    factors: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    device: torch.device


class AdaptedExperts:
    """The container of an experts module with adapters. Deep copies and pickles leave it out."""

    def __init__(self, experts: Any, parameters: Parameters, key: tuple[Any, ...], ranks: tuple[int, int]) -> None:
        self.container, self._key = _build(experts, parameters, ranks), (key, ranks)
        self._experts = weakref.ref(experts)
        self._last: tuple[tuple[Tensor | None, ...], torch.device] | None = None
        self.routing = ""

    def fits(self, experts: Any, key: tuple[Any, ...], ranks: tuple[int, int]) -> bool:
        """Whether it was built for this."""
        return self._experts() is experts and self._key == (key, ranks)

    def run(
        self, parameters: Parameters, adapters: list[Adapter | None], x: Tensor, index: Any, weights: Any
    ) -> Tensor:
        """[T, H]; afterwards it holds no tensor of the call."""
        first: Any = self.container._modules["fc1"]
        self._put(parameters, [factor for adapter in adapters for factor in adapter or (None, None)])
        self.routing = routed_by(index.dtype, x.device, first.num_groups, index.numel(), x.dtype)
        try:
            y: Tensor = self.container(x, top_k_index=index, top_k_weights=weights)
            return y
        finally:
            self._let_go(x.device)

    def _put(self, parameters: Parameters, factors: Any) -> None:
        for name, weight, bias, pair in zip(
            ("fc1", "fc2"), parameters[:2], parameters[2:], (factors[:2], factors[2:]), strict=True
        ):
            own: Any = self.container._modules[name]._parameters  # type: ignore[union-attr]
            own.update({"weight": weight} | ({} if bias is None else {"bias": bias}))
            own.update({k: t for k, t in zip(("lora_a", "lora_b"), pair, strict=True) if t is not None})

    def _let_go(self, device: torch.device) -> None:
        """Keeps the forms alone, and what was trained."""
        linears: list[Any] = [self.container._modules[name] for name in ("fc1", "fc2")]
        for linear in linears:
            for name, tensor in linear._parameters.items():
                linear._parameters[name] = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        self._last = tuple([linear._parameters.get(n) for linear in linears for n in ("lora_a", "lora_b")]), device

    def found(self, experts: Any) -> Found | str:
        """For ``fusible.explain``: the container, on tensors like those of the last call."""
        if self._last is None:
            return "no call yet"
        factors, device = self._last
        made = [
            None if t is None else torch.empty_like(t, device=device, requires_grad=t.requires_grad) for t in factors
        ]
        self._put(Parameters.of(experts), made)
        return Found(self.container, self.routing)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (type(None), ())


@contextmanager
def lent(experts: nn.Module, name: str, adapter: Adapter) -> Iterator[None]:
    """Within it, the forward of the experts adds the adapter to the parameter of that name."""
    adapters = experts.__dict__.setdefault(_LENT, {})
    adapters[name] = adapter
    try:
        yield
    finally:
        del adapters[name]
        if not adapters:
            experts.__dict__.pop(_LENT, None)


def lent_to(experts: Any) -> dict[str, Adapter] | None:
    """The adapters of this call, by the name of the parameter; None if there are none."""
    return experts.__dict__.get(_LENT)


def takes(experts: Any, name: str) -> bool:
    """Whether the parameter of an experts module can be adapted here, as it is."""
    return name in Names.of(experts)[:2] and refusal(experts, Parameters.of(experts)) is None


def experts_forward(experts: Any, adapters: dict[str, Adapter], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As of a module without adapters: [T, H], ids and weights [T, k] to [T, H]."""
    names, parameters = Names.of(experts), Parameters.of(experts)
    found = [adapters.get(name) for name in (names.up, names.down)]
    ranks = tuple([0 if adapter is None else adapter.a.shape[1] for adapter in found])
    key = _key(experts, parameters)
    layer: AdaptedExperts | None = experts.__dict__.get(_PLACE)
    if layer is None or not layer.fits(experts, key, ranks):  # type: ignore[arg-type]
        layer = experts.__dict__[_PLACE] = AdaptedExperts(experts, parameters, key, ranks)  # type: ignore[arg-type]
    autocasts = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    rows = x if autocasts else x.to(parameters.up.dtype)
    return layer.run(parameters, found, rows, index, weights).to(x.dtype)


def existing(experts: Any) -> AdaptedExperts | None:
    """What has run the experts with adapters."""
    layer: AdaptedExperts | None = experts.__dict__.get(_PLACE)
    return layer


def forget(experts: Any) -> None:
    """After a call without adapters, which is the last one then."""
    experts.__dict__.pop(_PLACE, None)


def _build(experts: Any, parameters: Parameters, ranks: tuple[int, int]) -> Sequential:
    op, reason = activation_of(experts)
    gate = op or OwnStep(experts, "_apply_gate" if experts.has_gate else "act_fn", reason)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    norm = {"norm": OwnStep(experts, "post_expert_norm", "a norm of the model's own")} if has_norm else {}
    fc1, fc2 = (
        _linear(experts, *pair, rank) for *pair, rank in zip(parameters[:2], parameters[2:], ranks, strict=True)
    )
    dispatch = Dispatch(fc1.num_groups)
    return Sequential(
        OrderedDict(dispatch=dispatch, fc1=fc1, act=gate, fc2=fc2, **norm, scale=Scale(), combine=Combine())
    )


def _linear(experts: Any, weight: Tensor, bias: Tensor | None, rank: int) -> GroupedLoRA:
    groups, rows, columns = weight.shape
    sizes = (rows, columns) if experts.is_transposed else (columns, rows)
    how = {"bias": bias is not None, "transposed_weight": experts.is_transposed}
    return GroupedLoRA(groups, *sizes, rank, device="meta", dtype=weight.dtype, **how)
