"""Gated linear units."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...fuser import Grads, Op, Promises, TensorSpec
from .. import kernels
from ..programs.compose import unscaled
from ..values.activation_spec import ActivationSpec, Interleaved, gated
from ..values.checks import check_floats, check_halves
from .link import Link


class Activated(Op):
    """The op of an :class:`ActivationSpec`; fusions look for it."""

    promises = Promises(replayable=True, values_checked=frozenset())

    class Saved(NamedTuple):
        preact: Tensor | None

    def __init__(self, spec: ActivationSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def gate_block(self) -> int | None:
        """The block size in which columns of gate and up alternate, 0 for gate before up; None if there is no gate."""
        return self.spec.block or 0 if self.spec.gated else None

    @property
    def link(self) -> Link:
        """The op as a link of a chain."""
        return Link(unscaled(self.spec.function), gated=self.spec.gated, block=self.spec.block)

    def check(self, x: TensorSpec) -> TensorSpec:
        check_floats(x)
        if self.spec.gated:
            check_halves(x, self.spec.block)
        return x._replace(shape=(*x.shape[:-1], self.spec.out_features(x.shape[-1])))

    def fwd(self, x: Tensor, *, needs_grad: frozenset[str]) -> tuple[Tensor, Saved]:
        return kernels.activate(x, self.spec), self.Saved(x if "x" in needs_grad else None)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        preact = saved.preact
        return {} if preact is None else {"x": kernels.activate_backward(dy, preact, self.spec).preact}

    def extra_repr(self) -> str:
        numbers = {k: v for k, v in vars(self.spec).items() if k not in ("name", "gated", "program")}
        return ", ".join([self.spec.name, *[f"{k}={v}" for k, v in numbers.items() if v != _DEFAULTS[k]]])


class GLU(Activated):
    """``act(gate) * (up + linear_offset)`` of an input whose columns are gate and up.

    With a limit, both are clamped first: gate to at most ``limit``, up to within ±``limit``. Clamped elements have a
    gradient of zero. Computed in float32 for half-precision inputs, and rounded once.

    Args:
        activation: silu, gelu (by erf), gelu_tanh, quick_gelu, relu, relu2 or sigmoid.
        limit: None, or a positive number.
        alpha: the slope inside silu: ``gate * sigmoid(alpha * gate)``.
        linear_offset: added to up.
        layout: ``"concat"``, gate in the first half of the columns (as TransformerEngine and Hugging Face have it,
            unlike ``torch.nn.GLU``), or :func:`interleaved`.

    Raises:
        ValueError: an argument that is not one of these.
        ArgumentError: at a call, if the columns do not divide into gate and up.
    """

    def __init__(
        self,
        activation: str,
        *,
        limit: float | None = None,
        alpha: float = 1.0,
        linear_offset: float = 0.0,
        layout: str | Interleaved = "concat",
    ) -> None:
        super().__init__(gated(activation, limit, alpha, linear_offset, layout))


_DEFAULTS: dict[str, object] = vars(gated("silu", None, 1.0, 0.0, "concat"))


class SwiGLU(GLU):
    """``silu(gate) * up``. Arxiv 2002.05202, equation 6."""

    def __init__(self, *, layout: str | Interleaved = "concat") -> None:
        super().__init__("silu", layout=layout)


class GEGLU(GLU):
    """``gelu(gate) * up``; ``approximate`` is ``"none"`` (by erf) or ``"tanh"``, as in ``torch.nn.GELU``."""

    def __init__(self, approximate: str = "none", *, layout: str | Interleaved = "concat") -> None:
        names = {"none": "gelu", "tanh": "gelu_tanh"}
        if approximate not in names:
            raise ValueError(f"GEGLU: approximate must be 'none' or 'tanh', got {approximate!r}")
        super().__init__(names[approximate], layout=layout)


class QGEGLU(GLU):
    """``gate * sigmoid(1.702 gate) * up``."""

    def __init__(self, *, layout: str | Interleaved = "concat") -> None:
        super().__init__("quick_gelu", layout=layout)


class ReGLU(GLU):
    """``relu(gate) * up``."""

    def __init__(self, *, layout: str | Interleaved = "concat") -> None:
        super().__init__("relu", layout=layout)


class SReGLU(GLU):
    """``relu(gate)**2 * up``."""

    def __init__(self, *, layout: str | Interleaved = "concat") -> None:
        super().__init__("relu2", layout=layout)


class ClampedSwiGLU(GLU):
    """``gate * sigmoid(alpha gate) * (up + linear_offset)``, clamped: the experts of gpt-oss."""

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        linear_offset: float = 1.0,
        layout: str | Interleaved = "concat",
    ) -> None:
        super().__init__("silu", limit=limit, alpha=alpha, linear_offset=linear_offset, layout=layout)
