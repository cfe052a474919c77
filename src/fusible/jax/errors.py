"""The errors of this package: ``fusible``'s, under the same names, without importing torch."""

from __future__ import annotations


class ArgumentError(TypeError, ValueError):
    """An invalid call: a wrong shape, dtype or keyword. Raised while the call is traced."""


class RefusedError(RuntimeError):
    """Raised under ``config(strict=True)`` if jax would run a call that the kernels refuse; the message says why."""
