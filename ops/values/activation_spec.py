"""An activation as a value that ops, patterns and kernels share. Defines no op and no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from numbers import Real

from ..programs.activations import ACTIVATIONS, Curve, program_of
from ..programs.compose import is_linear_in_scale, scaled
from ..programs.program import Program

_SLOPED = ("silu",)


@dataclass(frozen=True)
class Interleaved:
    """Gate and up columns alternate in blocks: for 1, g0 u0 g1 u1 …; for 32, TransformerEngine's layout."""

    block: int


@dataclass(frozen=True)
class ActivationSpec:
    """``act(gate) * (up + linear_offset)`` if gated, ``act(x)`` if not; or a user's function.

    Attributes:
        name: one of :data:`ACTIVATIONS`; or the name of a user's function.
        gated: whether the input is a gate and an up half.
        limit: gate is clamped to at most this, up to within plus and minus this; None for no limit.
        alpha: the slope inside silu: ``g * sigmoid(alpha * g)``.
        linear_offset: added to up.
        block: the block size in which columns of gate and up alternate; None for one block each ("concat").
        program: the user's function of gate, up and the scale of the row (``r0``); None for a name of
            :data:`ACTIVATIONS`, whose value is multiplied by the scale.

    Raises:
        ValueError: another name, a limit or a block that is not positive, a number that is not finite.
    """

    name: str
    gated: bool = False
    limit: float | None = None
    alpha: float = 1.0
    linear_offset: float = 0.0
    block: int | None = None
    program: Program | None = None

    def __post_init__(self) -> None:
        if self.program is None and self.name not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {self.name!r}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive or None; got {self.limit}")
        if not -inf < self.alpha < inf or not -inf < self.linear_offset < inf:
            raise ValueError(f"alpha and linear_offset must be finite; got {self.alpha} and {self.linear_offset}")
        if self.block is not None and self.block < 1:
            raise ValueError(f"block must be at least 1 or None; got {self.block}")

    def out_features(self, in_features: int) -> int:
        """The number of output columns."""
        return in_features // 2 if self.gated else in_features

    @property
    def curve(self) -> Curve:
        """The curve of a name of :data:`ACTIVATIONS`."""
        return Curve.of(self.name, self.alpha)

    @property
    def function(self) -> Program:
        """The program of the activation, gradients included, in gate, up and the scale of the row."""
        return self.program or program_of(self.curve, self.gated, self.limit, self.linear_offset)

    @property
    def is_linear_in_scale(self) -> bool:
        """Whether the value is linear in the scale of the row."""
        return self.program is None or is_linear_in_scale(self.program)


@lru_cache(maxsize=1024)
def spec_of_program(program: Program, block: int | None) -> ActivationSpec:
    """The activation of a program; a program without a number of the row is multiplied by the scale."""
    with_scale = program if program.rows else scaled(program)
    gated = len(program.arguments) == 2
    return ActivationSpec(with_scale.name, gated=gated, block=block, program=with_scale)


def gated(
    name: str, limit: float | None, alpha: float, linear_offset: float, layout: str | Interleaved
) -> ActivationSpec:
    """The spec of a GLU with this activation on its gate.

    Raises:
        ValueError: an unknown activation or layout, a limit that is not positive, an alpha of 0 or without silu, or a
            number that is not finite.
    """
    limit = limit if limit is None else _number("limit", limit)
    alpha, linear_offset = _number("alpha", alpha), _number("linear_offset", linear_offset)
    if not alpha:
        raise ValueError("alpha must not be 0, with which silu is half of its argument")
    if alpha != 1.0 and name not in _SLOPED:
        raise ValueError(f"alpha is the slope inside silu, which {name!r} does not have; leave it at 1.0, got {alpha}")
    spec = replace(ActivationSpec(name), gated=True, limit=limit, alpha=alpha, linear_offset=linear_offset)
    if isinstance(layout, Interleaved):
        return replace(spec, block=layout.block)
    if layout != "concat":
        raise ValueError(f"layout must be 'concat' or interleaved(n); got {layout!r}")
    return spec


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number; got {value!r}")
    return float(value)


def interleaved(block: int) -> Interleaved:
    """The GLU layout in which ``block`` columns of gate and ``block`` columns of up alternate.

    Raises:
        ValueError: ``block`` is not a positive int.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"interleaved: the block must be a positive int, got {block!r}")
    return Interleaved(block)
