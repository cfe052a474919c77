"""The switches. ``with config(strict=True): ...`` holds for this thread, and for the backward of what ran in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from threading import local
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from .torch_private import mark_constant

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Marks a function whose result ``torch.compile`` may take for a constant.

    Does what ``torch.compiler.assume_constant_result`` does, without importing the compiler, which takes seconds.
    """
    mark_constant(function)
    return function


@dataclass(frozen=True)
class Config:
    """What :func:`config` sets; see there. Those in force are one object wherever they are equal.

    Attributes:
        recompute: fused experts keep their input in place of the pre-activation.
        same_weights: what ops make of their weights may be kept between calls; set by ``fusible.same_weights()``.
    """

    strict: bool = False
    deterministic: bool = True
    backend: str = "auto"
    disable_fusions: frozenset[str] = frozenset()
    debug: bool = False
    recipe: Hashable | None = None
    recompute: bool = False
    same_weights: bool = False

    @cached_property
    def token(self) -> object:
        """What stands for it in the keys of caches. Unlike its id it never comes back, and it is hashed at once."""
        return object()


@constant
def config_of(**switches: Any) -> Config:
    """The one object with these switches, for as long as somebody has it."""
    config = Config(**switches)
    return _in_use.setdefault(tuple(vars(config).values()), config)


_SWITCHES = tuple([field.name for field in fields(Config)])  # a compiler cannot ask for fields
_in_use: WeakValueDictionary[tuple[Any, ...], Config] = WeakValueDictionary()
BACKENDS = ("auto", "hopper", "triton", "grouped_mm", "loop")
_FLAGS: dict[str, Any] = {"0": False, "1": True}
_VALUES = {"strict": _FLAGS, "debug": _FLAGS, "backend": {name: name for name in BACKENDS}}  # what variables may say


def defaults_of(environment: Mapping[str, str]) -> Config:
    """The switches that hold where no :func:`config` is, for jobs whose code one cannot edit.

    ``FUSIBLE_STRICT`` and ``FUSIBLE_DEBUG`` are 0 or 1, ``FUSIBLE_BACKEND`` is a backend, and
    ``FUSIBLE_DISABLE_FUSIONS`` names fusions, with commas between them. One that is empty counts as not there.

    Raises:
        ValueError: a variable with another value.
    """
    switches = vars(Config())
    for name, values in _VALUES.items():
        variable = f"FUSIBLE_{name.upper()}"
        if value := environment.get(variable, "").strip():
            if value not in values:
                raise ValueError(f"{variable} must be one of {', '.join(values)}, got {value!r}")
            switches = {**switches, name: values[value]}
    names = environment.get("FUSIBLE_DISABLE_FUSIONS", "").split(",")
    return config_of(**{**switches, "disable_fusions": frozenset(filter(None, map(str.strip, names)))})


_DEFAULT = defaults_of(os.environ)


class ThreadConfig(local):
    """The switches in force in this thread: no ``ContextVar``, which ``torch.compile`` cannot guard on."""

    def __init__(self) -> None:
        self.config = _DEFAULT


thread_config = ThreadConfig()


def active_config() -> Config:
    """The switches in force."""
    return thread_config.config


@contextmanager
def use_config(switches: Config) -> Iterator[None]:
    """Puts ``switches`` in force."""
    before, thread_config.config = thread_config.config, switches
    try:
        yield
    finally:
        thread_config.config = before


@contextmanager
def config(
    *,
    strict: bool | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    disable_fusions: Collection[str] | None = None,
    debug: bool | None = None,
    recipe: Hashable | None = None,
    recompute: bool | None = None,
) -> Iterator[Config]:
    """Changes the given switches for the body of the ``with``.

    Their defaults come from environment variables, read when ``fusible`` is imported: ``FUSIBLE_STRICT``,
    ``FUSIBLE_DEBUG`` (0 or 1), ``FUSIBLE_BACKEND``, ``FUSIBLE_DISABLE_FUSIONS`` (names, with commas between them).

    Args:
        strict: raise :class:`RefusedError` where a fusion is refused or a kernel falls back.
        deterministic: results are bitwise the same from run to run. All present kernels are, with or without it; the
            switch keeps that promise should a faster one not be.
        backend: ``"auto"``, or the only grouped-GEMM backend to use: ``"hopper"``, ``"triton"``, ``"grouped_mm"``,
            ``"loop"``.
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
    flags = {"strict": strict, "deterministic": deterministic, "debug": debug, "recompute": recompute}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"config: {name} must be True or False, got {flag!r}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"config: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if isinstance(disable_fusions, str):
        raise ValueError(f"config: disable_fusions must be a collection of names, such as {{{disable_fusions!r}}}")
    if recipe is not None and (isinstance(recipe, type) or not is_dataclass(recipe)):
        raise ValueError(f"config: recipe must be one such as fusible.Float8Block(), got {recipe!r}")
    arguments: dict[str, Any] = {
        **flags,
        "backend": backend,
        "disable_fusions": None if disable_fusions is None else frozenset(disable_fusions),
        "recipe": recipe,
    }
    changes = {name: value for name, value in arguments.items() if value is not None}
    with changed(**changes) as switches:
        yield switches


@contextmanager
def changed(**changes: Any) -> Iterator[Config]:
    """Puts the switches in force with these changes."""
    before = active_config()
    switches = config_of(**{name: changes.get(name, getattr(before, name)) for name in _SWITCHES})
    with use_config(switches):
        yield switches
