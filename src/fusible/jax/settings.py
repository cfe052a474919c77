"""The switches of this package. They are read while a function is traced; compiled functions keep them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import local

BACKENDS = ("auto", "hopper", "xla")


@dataclass(frozen=True)
class Switches:
    """The values that :func:`config` sets."""

    backend: str = "auto"
    strict: bool = False


class _OfThread(local):
    settings = Switches()


_thread = _OfThread()


def active() -> Switches:
    """The switches in force in this thread."""
    return _thread.settings


@contextmanager
def config(*, backend: str | None = None, strict: bool | None = None) -> Iterator[Switches]:
    """Changes the given switches for functions traced in the body of the ``with``, in this thread.

    Args:
        backend: ``"auto"``: the Hopper kernels where all GPUs of the process can run them. ``"hopper"``: always the
            Hopper kernels, to export a program without such a GPU. ``"xla"``: ``jax.lax.ragged_dot`` everywhere.
        strict: raise :class:`RefusedError` if ``jax.lax.ragged_dot`` would run instead of the kernels.

    Raises:
        ValueError: an unknown backend.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"config: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    before = _thread.settings
    changes = {"backend": backend, "strict": strict}
    _thread.settings = replace(before, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
    try:
        yield _thread.settings
    finally:
        _thread.settings = before
