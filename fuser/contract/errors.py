"""The errors that a call can raise. Each names the op, the argument, the expected and the given value, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LONG = 200


def shown(value: object) -> str:
    """``repr`` for an error, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({len(text)} characters)"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, or nothing."""
    near = get_close_matches(name, list(names), 1) if isinstance(name, str) and len(name) <= _LONG else []
    return f"; did you mean {near[0]!r}?" if near else ""


class ArgumentError(TypeError, ValueError):
    """A call that does not fit: a keyword, a shape, a dtype, a device, a buffer.

    It is a ``TypeError``, as for any bad call in Python, and a ``ValueError``, which callers of other op fusers expect.
    """

    def located(self, where: str) -> ArgumentError:
        """The same error, prefixed by the op."""
        return ArgumentError(f"{where}: {self}")


class DoubleBackwardError(RuntimeError):
    """A second derivative was asked for; ops have first-order gradients only."""


class RefusedError(RuntimeError):
    """Under ``config(strict=True)``: a fusion was refused or a kernel fell back. The message says why."""
