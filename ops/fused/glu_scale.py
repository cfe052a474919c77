"""A built-in activation and the scale after it, rounded once; keeps the pre-activation instead of the hidden rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...fuser import FusedOp, Gradient, Grads, Pattern, Promises, register_fusion
from .. import kernels
from ..basic.glu import Activated
from ..basic.scale import Scale


@register_fusion(Pattern.path(act=Activated, scale=Scale), priority=-20)
class GLUScale(FusedOp):
    """``act(x) * scales[:, None]`` as one kernel."""

    promises = Promises(replayable=True)
    act: Activated

    class Saved(NamedTuple):
        preact: Tensor
        scales: Tensor

    def fwd(self, x: Tensor, *, scales: Tensor) -> tuple[Tensor, Saved]:
        return kernels.activate(x, self.act.spec, scales), self.Saved(x, scales)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        preact, scales = saved
        grads = kernels.activate_backward(dy, preact, self.act.spec, scales, want_scales="scales" in needs_grad)
        named: dict[str, Gradient] = {"x": grads.preact, "scales": grads.scales}
        return {name: gradient for name, gradient in named.items() if name in needs_grad}
