"""torchtitan's routed experts on our ops: an override of ``GroupedExperts``.

    --override.imports fusible.integrations.torchtitan.grouped_experts

Gate and up are one parameter and one product, as in torchtitan's own ``fused_swiglu`` override, from which the
parameter, its initial values, its sharding and its checkpoints (``w1_EFD``, ``w2_EDF``, ``w3_EFD``) come.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.config import derive, override
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.overrides import fused_swiglu

from ..fuser import Sequential
from ..fuser.explain.model import LayerContainer, add_finder
from ..ops import GroupedLinear, SwiGLU, grouped_gemm, interleaved
from .hugging_face.experts import parameters_in

DTYPE = torch.bfloat16  # in which torchtitan multiplies, whatever the parameters are


class FusibleGroupedExperts(fused_swiglu.FusedGroupedExperts):  # type: ignore[misc]
    """``GroupedExperts``: rows sorted by expert, and how many each has; scores are applied by the dispatcher.

    ``w13`` is [E, F, 2, D]: rows of gate and of up alternate. Rows past the last expert's give zeros.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(fused_swiglu.FusedGroupedExperts.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._container: tuple[Sequential, ...] = ()  # in a tuple: no child, its parameters are those here

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Runs the experts on rows [R, D]; returns [R, D] in the dtype of the rows. Products are in bfloat16."""
        if self._runs_torchtitan_products():
            theirs: Tensor = super().forward(x_RD, num_tokens_per_expert_E)
            return theirs
        w13, w2 = self._weights()
        run = _traced if torch.compiler.is_compiling() else self._run
        return run(x_RD.to(DTYPE), num_tokens_per_expert_E, w13, w2).type_as(x_RD)

    def explained(self) -> LayerContainer | str:
        """The container for ``fusible.explain`` on the current weights, or the reason why there is none."""
        if not self._container:
            theirs = "torchtitan's own products run: they are quantised, or their types are checked"
            return theirs if self._runs_torchtitan_products() else "no call yet"
        trained = self.w13.requires_grad, self.w2_EDF.requires_grad
        weights = [w.detach().requires_grad_(of) for w, of in zip(self._weights(), trained, strict=True)]
        _lend(self._container[0], *weights)
        return LayerContainer(self._container[0])

    def _runs_torchtitan_products(self) -> bool:
        """Whether a converter has replaced the products, or torchtitan's checker of types follows them."""
        replaced = type(self)._grouped_mm is not GroupedExperts._grouped_mm
        return replaced or (get_spmd_backend() == "spmd_types" and spmd.is_type_checking())

    def _weights(self) -> tuple[Tensor, Tensor]:
        """The weights of the local experts, [E, 2F, D] and [E, D, F]."""
        weights = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w13, self.w2_EDF))
        w13, w2 = (w.to(DTYPE) for w in weights)
        return w13.flatten(1, 2), w2

    def _run(self, rows: Tensor, sizes: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        (groups, double, dim), hidden = w13.shape, w2.shape[2]
        if not self._container or self._container[0].fc1.weight.shape != w13.shape:  # type: ignore[union-attr]
            linear = partial(GroupedLinear, groups, bias=False, device="meta", dtype=DTYPE)
            fc1, fc2 = linear(dim, double), linear(hidden, dim)
            self._container = (Sequential(OrderedDict(fc1=fc1, act=SwiGLU(layout=interleaved(1)), fc2=fc2)),)
        container = self._container[0]
        _lend(container, w13, w2)
        try:
            y: Tensor = container(rows, split_sizes=_whole(sizes))
            return y
        finally:  # casts of sharded weights are as large as the experts, and not to outlive the call
            _lend(container, torch.empty_like(w13, device="meta"), torch.empty_like(w2, device="meta"))


@override(  # type: ignore[untyped-decorator]
    target=GroupedExperts.Config, description="Routed experts on fusible's grouped GEMMs."
)
def grouped_experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    """Replaces the configuration by one of :class:`FusibleGroupedExperts`; those of subclasses stay unchanged."""
    fused = fused_swiglu.fused_grouped_experts(cfg)
    if type(fused) is not fused_swiglu.FusedGroupedExperts.Config:
        return cfg
    return derive(fused, FusibleGroupedExperts.Config)


def _whole(sizes: Tensor) -> Tensor:
    """Converts the numbers of tokens, which some dispatchers count in floating point, to integers."""
    return sizes.to(torch.int32) if sizes.is_floating_point() else sizes


def _lend(container: Sequential, w13: Tensor, w2: Tensor) -> None:
    parameters_in(container, "fc1")["weight"] = w13
    parameters_in(container, "fc2")["weight"] = w2


def _traced(rows: Tensor, sizes: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The experts in compiled code; the compiler fuses the ops between the products."""
    sizes = _whole(sizes)
    pre = grouped_gemm(rows, w13, sizes)
    assert isinstance(pre, Tensor)
    gate, up = torch.unflatten(pre, -1, (-1, 2)).unbind(-1)
    y = grouped_gemm(F.silu(gate) * up, w2, sizes)
    assert isinstance(y, Tensor)
    return y


def _explained(module: nn.Module) -> LayerContainer | str | None:
    return module.explained() if isinstance(module, FusibleGroupedExperts) else None


add_finder(_explained)
