"""Recipes: which format the operands of a grouped product are quantised to. Values, part of settings and plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from ...fuser.contract.errors import did_you_mean, shown

ScaleKind = Literal["power_of_two", "float32"]
GradientFormat = Literal["e4m3", "e5m2"]
WgradFormat = Literal["float8", "bfloat16"]
Compute = Literal["exact", "fast"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "scales": get_args(ScaleKind),
    "gradient": get_args(GradientFormat),
    "wgrad": get_args(WgradFormat),
}


def _check_choice(recipe: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(recipe, name)
    if value not in choices:
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{type(recipe).__name__}: {name} must be {expected}, got {shown(value)}{near}")


def _check_flag(recipe: object, name: str) -> None:
    if not isinstance(value := getattr(recipe, name), bool):
        raise ValueError(f"{type(recipe).__name__}: {name} must be True or False, got {shown(value)}")


def _check(recipe: object) -> None:
    """The fields that several recipes share."""
    for name, choices in _CHOICES.items():
        if hasattr(recipe, name):
            _check_choice(recipe, name, choices)
    if hasattr(recipe, "fast_accumulation"):
        _check_flag(recipe, "fast_accumulation")


@dataclass(frozen=True)
class NoRecipe:
    """Nothing is quantised: for an op in a ``config(recipe=...)`` that does not apply to it."""


@dataclass(frozen=True)
class Float8Block:
    """e4m3, rows scaled in blocks of 1 x 128 and weights in blocks of 128 x 128.

    Attributes:
        scales: "power_of_two", or "float32": a little closer where one value dominates a block.
        gradient: the format of incoming gradients; "e5m2" has twice the error, and range that block scales have anyway.
        wgrad: "float8", or "bfloat16": weight gradients are products of what was not quantised.

    Raises:
        ValueError: another value.
    """

    scales: ScaleKind = "power_of_two"
    gradient: GradientFormat = "e4m3"
    wgrad: WgradFormat = "float8"

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Float8Row:
    """e4m3, one scale for each row of an operand.

    Attributes:
        scales, gradient, wgrad: as for :class:`Float8Block`.
        fast_accumulation: whole products of rows and weights are summed in the tensor core's short accumulator, where
            sums of one sign lose some percent; else sums are promoted every 128 values, as those of weight gradients
            always are.

    Raises:
        ValueError: another value.
    """

    scales: ScaleKind = "power_of_two"
    gradient: GradientFormat = "e4m3"
    wgrad: WgradFormat = "float8"
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Delayed:
    """The scale of a tensor comes from the largest of its last ``history`` amaxes, divided by 2 ** ``margin``.

    Raises:
        ValueError: a history that is not positive, a margin that is negative.
    """

    history: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        for name, least in (("history", 1), ("margin", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Delayed: {name} must be an int of at least {least}, got {shown(value)}")


@dataclass(frozen=True)
class Float8Tensor:
    """One scale for all rows of a group, and one for each expert's weight.

    Attributes:
        scales, gradient, wgrad, fast_accumulation: as for :class:`Float8Row`.
        delayed: scales come from past amaxes, which a linear with this recipe of its own keeps in buffers; None: from
            the tensor itself.

    Raises:
        ValueError: another value.
    """

    scales: ScaleKind = "float32"
    gradient: GradientFormat = "e4m3"
    wgrad: WgradFormat = "float8"
    fast_accumulation: bool = False
    delayed: Delayed | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.delayed is not None and not isinstance(self.delayed, Delayed):
            raise ValueError(f"Float8Tensor: delayed must be a Delayed or None, got {shown(self.delayed)}")


@dataclass(frozen=True)
class MXFP8:
    """e4m3 with a power of two for each 32 values along the contraction, as Blackwell multiplies it.

    Attributes:
        compute: "exact": dequantised to bfloat16, which loses nothing, and multiplied there; "fast": regrouped to
            blocks of 128 and multiplied as :class:`Float8Block`.

    Raises:
        ValueError: another value.
    """

    compute: Compute = "exact"

    def __post_init__(self) -> None:
        _check_choice(self, "compute", get_args(Compute))


@dataclass(frozen=True)
class NVFP4:
    """e2m1 with an e4m3 scale for each 16 values and a float32 scale for the tensor; computed exactly, in bfloat16.

    Attributes:
        stochastic_rounding: of gradients.
        hadamard: rows are transformed before they are quantised for a weight gradient.

    Raises:
        ValueError: another value.
    """

    stochastic_rounding: bool = True
    hadamard: bool = True
    compute: Literal["exact"] = "exact"

    def __post_init__(self) -> None:
        _check_flag(self, "stochastic_rounding")
        _check_flag(self, "hadamard")
        _check_choice(self, "compute", ("exact",))


@dataclass(frozen=True)
class MXFP4:
    """Weights in e2m1 with a power of two for each 32 values along the contraction, as gpt-oss's checkpoints have them.

    Rows and gradients are not quantised. Products are exact, in bfloat16.
    """

    wgrad: ClassVar[WgradFormat] = "bfloat16"


Recipe = Float8Block | Float8Row | Float8Tensor | MXFP8 | MXFP4 | NVFP4 | NoRecipe
"""What a linear or :func:`fusible.config` may be given."""
