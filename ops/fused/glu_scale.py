"""An activation and the scale that follows it, rounded once; keeps the pre-activation instead of the hidden rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...fuser import FusedOp, Gradient, Grads, Pattern, register_fusion
from .. import kernels
from ..glu import Activated
from ..pointwise import Pointwise
from ..scale import Scale
from .activation_role import ACTIVATION, spec_of, with_activation


@register_fusion(with_activation(Pattern.path(act=ACTIVATION, scale=Scale)), priority=10)
class GLUScale(FusedOp):
    """``act(x) * scales[:, None]``."""

    replayable = True
    act: Activated | Pointwise

    class Saved(NamedTuple):
        preact: Tensor
        scales: Tensor

    def fwd(self, x: Tensor, *, scales: Tensor) -> tuple[Tensor, Saved]:
        return kernels.activate(x, spec_of(self.act), scales), self.Saved(x, scales)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        preact, scales = saved
        grads = kernels.activate_backward(dy, preact, spec_of(self.act), scales, want_scales="scales" in needs_grad)
        named: dict[str, Gradient] = {"x": grads.preact, "scales": grads.scales}
        return {name: gradient for name, gradient in named.items() if name in needs_grad}
