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
    """The switches that :func:`config` sets; described there.

    Attributes:
        recompute: fused experts keep their input in place of the pre-activation.
        same_weights: values that ops derive from their weights may be kept between calls; set by
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

    Results are bitwise the same from run to run, whatever the switches.

    Their defaults come from environment variables, read when ``fusible`` is imported: ``FUSIBLE_STRICT``,
    ``FUSIBLE_DEBUG`` (0 or 1), ``FUSIBLE_BACKEND``, ``FUSIBLE_DISABLE_FUSIONS`` (names, with commas between them).

    Args:
        strict: raise :class:`RefusedError` where a fusion is refused or a kernel falls back.
        backend: ``"auto"``, or the only grouped-GEMM backend to use: ``"hopper"``, ``"triton"``,
            ``"grouped_mm"``, ``"loop"``.
        disable_fusions: names of fusions that must not fire, such as ``{"GroupedMLP"}``.
        debug: also check what needs a device synchronisation, such as the values of split sizes.
        recipe: what ops that have no recipe of their own quantise their operands by, such as
            ``fusible.Float8Block()``; ``fusible.NoRecipe()`` for nothing.
        recompute: ``GroupedMLP`` and ``RoutedMLP`` keep their input alone for the backward, and compute the first
            linear again there: the same gradients, bit for bit, from less memory. Ops that are not fused into one of
            these, and quantised ones, keep what they always do.

    Raises:
        ValueError: a switch that is no bool; an unknown backend; a string for ``disable_fusions``; a recipe that is no
            frozen dataclass.
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
