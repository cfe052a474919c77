"""The switches: values in force for a thread, and for the backward of calls made in it.

The compiler has three. Other packages add theirs in a subclass of :class:`Config`: see :func:`extend`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from threading import local
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch

from .torch_private import current_recomputation, mark_constant

Flags = tuple[tuple[str, object], ...]
"""Switches, by name."""
F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """Marks a function whose result ``torch.compile`` may treat as a constant.

    Does what ``torch.compiler.assume_constant_result`` does, without importing the compiler, which takes seconds.
    """
    mark_constant(function)
    return function


@dataclass(frozen=True)
class Config:
    """The switches in force. Equal switches are one object.

    Attributes:
        strict: whether a refused fusion, or a kernel that falls back, is an error.
        disable_fusions: the names of fusions that must not fire.
        debug: whether values are checked that need a synchronisation with the device.
        variables: the switches that environment variables set, and the meaning of each word.

    Raises:
        ValueError: a value that a switch cannot have.
    """

    strict: bool = False
    disable_fusions: frozenset[str] = frozenset()
    debug: bool = False
    variables: ClassVar[Mapping[str, Mapping[str, object]]] = {
        name: {"0": False, "1": True} for name in ("strict", "debug")
    }

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(getattr(type(self), name), bool) and not isinstance(value, bool):
                raise ValueError(f"config: {name} must be True or False, got {value!r}")
        if isinstance(self.disable_fusions, str):
            raise ValueError(
                f"config: disable_fusions must be a collection of names, such as {{{self.disable_fusions!r}}}"
            )
        for name in self.disable_fusions:
            if not isinstance(name, str):
                raise ValueError(f"config: disable_fusions must be names, such as {{'GroupedMLP'}}, got {name!r}")

    @cached_property
    def token(self) -> object:
        """Represents the config in cache keys. Unlike an id it is never reused, and it hashes at once."""
        return object()


@constant
def config_of(**switches: Any) -> Config:
    """The one object with these switches, for as long as it is in use."""
    config = _kind(**switches)
    return _in_use.setdefault(tuple(vars(config).values()), config)


_kind: type[Config] = Config
_in_use: WeakValueDictionary[tuple[object, ...], Config] = WeakValueDictionary()


def defaults_of(environment: Mapping[str, str]) -> Config:
    """The switches outside of every ``config``, for jobs whose code cannot be edited.

    ``FUSIBLE_STRICT`` sets ``strict`` and so on; ``FUSIBLE_DISABLE_FUSIONS`` names fusions, with commas between them.
    An empty variable counts as unset.

    Raises:
        ValueError: a variable with another value.
    """
    switches: dict[str, object] = {}
    for name, values in _kind.variables.items():
        variable = f"FUSIBLE_{name.upper()}"
        if value := environment.get(variable, "").strip():
            if value not in values:
                raise ValueError(f"{variable} must be one of {', '.join(values)}, got {value!r}")
            switches[name] = values[value]
    names = environment.get("FUSIBLE_DISABLE_FUSIONS", "").split(",")
    return config_of(**switches, disable_fusions=frozenset(filter(None, map(str.strip, names))))


class ThreadConfig(local):
    """The switches in force in this thread: no ``ContextVar``, which ``torch.compile`` cannot guard on."""

    def __init__(self) -> None:
        self.config = _default


_default = defaults_of(os.environ)
thread_config = ThreadConfig()


def extend(kind: type[Config]) -> None:
    """Makes a subclass the class of all switches from now on; to be called where it is defined.

    Raises:
        ValueError: an environment variable has a value that its switch cannot have.
    """
    global _kind, _default
    _kind = kind
    thread_config.config = _default = defaults_of(os.environ)


active_config: Callable[[], Config] = partial(getattr, thread_config, "config")
"""Returns the switches in force. It is written in C, since every hot call asks for them."""


@contextmanager
def use_config(switches: Config) -> Iterator[None]:
    """Puts ``switches`` in force."""
    before, thread_config.config = thread_config.config, switches
    try:
        yield
    finally:
        thread_config.config = before


class _RecomputedForward(NamedTuple):
    """The function that a checkpoint calls in the backward, which may be in another thread, under these switches."""

    switches: Config
    function: Callable[..., object]

    def __call__(self, *arguments: object) -> object:
        with use_config(self.switches):
            return self.function(*arguments)


def keep_for_recomputation() -> None:
    """Makes the checkpoint that runs, if there is one, compute its forward again under the switches in force.

    To be called where switches are read or changed: the first call in a checkpoint finds those that it began with.
    """
    if (kept := current_recomputation()) is None:
        return
    function = getattr(*kept)
    if not isinstance(function, _RecomputedForward):
        setattr(*kept, _RecomputedForward(active_config(), function))


@contextmanager
def changed(**changes: Any) -> Iterator[Config]:
    """Puts the switches in force with these changes.

    Raises:
        ValueError: a value that a switch cannot have.
    """
    if not torch.compiler.is_dynamo_compiling():
        keep_for_recomputation()
    before = active_config()
    names = type(before).__match_args__  # those of its fields, which a compiler cannot ask for
    switches = config_of(**{name: changes.get(name, getattr(before, name)) for name in names})
    with use_config(switches):
        yield switches
