"""The first half of an expert alone: GroupedLinear -> activation -> [Scale]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...fuser import Buffer, FusedOp, Gradient, Grads, Pattern, Promises, optional, register_fusion
from .. import kernels
from ..basic.glu import Activated
from ..basic.scale import Scale
from ..grouped.grouped_linear import GroupedLinear, LinearCall, as_rows, flat, with_rows_of
from ..grouped.pointwise import Pointwise
from ..kernels import ActivationCall
from ..quantized.activation import ActivatedProduct
from .activation_role import (
    ACTIVATION_OR_CHAIN,
    keyword_of,
    spec_of,
    vector_grads,
    vectors_of,
    wants_vectors,
    with_activation,
)
from .parts import FC1, filed, names_of
from .pointwise_chain import PointwiseChain


@register_fusion(
    with_activation(Pattern.path(fc1=GroupedLinear, act=ACTIVATION_OR_CHAIN, scale=optional(Scale))).absent(
        "output", "fc1"
    ),
    priority=20,
)
class GroupedLinearGLU(FusedOp):
    """``act(x W^T + bias) * scales`` as one kernel, which keeps x, the pre-activation, the scales and the weight."""

    promises = Promises(replayable=True)
    fc1: GroupedLinear
    act: Activated | Pointwise | PointwiseChain
    scale: Scale | None

    class Saved(NamedTuple):
        fc1: GroupedLinear.Saved
        preact: Tensor | None
        scales: Tensor | None
        vectors: tuple[Tensor, ...] | None

    def takes(self, role: str, keyword: str) -> str | None:
        return keyword_of(role, keyword) or super().takes(role, keyword)

    def fwd(
        self,
        x: Tensor,
        *,
        split_sizes: Tensor,
        scales: Tensor | None = None,
        grad_input: Buffer | None = None,
        fc1_bias_scale: Tensor | None = None,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
        x_is_inner: bool,
    ) -> tuple[Tensor, Saved]:
        sizes, needs, vectors = (
            kernels.as_split_sizes(split_sizes, x.device),
            names_of(FC1, needs_grad),
            vectors_of(self.act),
        )
        call = LinearCall(sizes, needs, fc1_bias_scale, grad_input, x.shape, x_is_inner)
        behind = ActivationCall(flat(scales), bool(needs_grad), vectors=vectors)
        activating = ActivatedProduct(spec_of(self.act), behind)
        (preact, hidden), fc1 = self.fc1.multiply(self.fc1.reads(x, call, autocast_dtype), call, activating)
        assert hidden.values is not None
        return with_rows_of(x, hidden.values), self.Saved(fc1, preact, scales, vectors)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        if saved.preact is None:
            return {}
        activated = kernels.activate_backward(
            as_rows(dy),
            saved.preact,
            spec_of(self.act),
            flat(saved.scales),
            want_scales="scales" in needs_grad,
            vectors=saved.vectors,
            split_sizes=None if saved.vectors is None else saved.fc1.split_sizes,
            want_vectors=wants_vectors(needs_grad),
        )
        fc1 = self.fc1.bwd(saved.fc1, activated.preact, needs_grad=names_of(FC1, needs_grad))
        grads: dict[str, Gradient] = filed(FC1, fc1)
        grads |= vector_grads(self.act, activated.vectors, needs_grad)
        if saved.scales is not None and activated.scales is not None:
            grads["scales"] = activated.scales.view_as(saved.scales)
        return grads
