"""``config(...)``: the switches of the compiler, and those that ops and kernels add."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import cast

from ...fuser.contract.config import Config, active_config, changed, extend

BACKENDS = ("auto", "hopper", "triton", "grouped_mm", "loop")


@dataclass(frozen=True)
class OpConfig(Config):
    """The switches that :func:`config` sets and describes.

    Attributes:
        recompute: whether fused experts keep their input in place of the pre-activation.
        same_weights: whether values that ops derive from their weights may be kept between calls; set by
            ``fusible.same_weights()``.
    """

    backend: str = "auto"
    recipe: Hashable | None = None
    recompute: bool = False
    same_weights: bool = False
    variables = {**Config.variables, "backend": {name: name for name in BACKENDS}}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend not in BACKENDS:
            raise ValueError(f"config: backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.recipe is not None and (isinstance(self.recipe, type) or not is_dataclass(self.recipe)):
            raise ValueError(f"config: recipe must be one such as fusible.Float8Block(), got {self.recipe!r}")


extend(OpConfig)
active_switches = cast(Callable[[], OpConfig], active_config)
"""The switches in force."""


@contextmanager
def config(
    *,
    strict: bool | None = None,
    backend: str | None = None,
    disable_fusions: Collection[str] | None = None,
    debug: bool | None = None,
    recipe: Hashable | None = None,
    recompute: bool | None = None,
) -> Iterator[Config]:
    """Changes the given switches for the body of the ``with``.

    Results are bitwise the same from run to run under all switches.

    The defaults come from environment variables, read when ``fusible`` is imported: ``FUSIBLE_STRICT``,
    ``FUSIBLE_DEBUG`` (0 or 1), ``FUSIBLE_BACKEND``, ``FUSIBLE_DISABLE_FUSIONS`` (names, separated by commas).

    Args:
        strict: raise :class:`RefusedError` if a fusion is refused or a kernel falls back.
        backend: ``"auto"``, or the only backend for grouped GEMMs: ``"hopper"``, ``"triton"``, ``"grouped_mm"``,
            ``"loop"``.
        disable_fusions: names of fusions that must not fire, such as ``{"GroupedMLP"}``.
        debug: also run checks that synchronise with the device, such as those of the values of split sizes.
        recipe: the recipe of ops that have no recipe of their own, such as ``fusible.Float8Block()``;
            ``fusible.NoRecipe()`` for none.
        recompute: ``GroupedMLP`` and ``RoutedMLP`` keep only their input for the backward, and compute the first linear
            again there: the same gradients, bit for bit, from less memory. It has no effect on unfused and quantised
                ops.

    Raises:
        ValueError: a switch that is not a bool; an unknown backend; a string for ``disable_fusions``; a recipe that is
            not a frozen dataclass.
    """
    names = disable_fusions
    if names is not None and not isinstance(names, str):
        names = frozenset(names)
    switches = {
        "strict": strict,
        "backend": backend,
        "disable_fusions": names,
        "debug": debug,
        "recipe": recipe,
        "recompute": recompute,
    }
    with changed(**{name: value for name, value in switches.items() if value is not None}) as active:
        yield active
