"""The errors of this package: those of ``fusible`` under their names, without importing torch."""

from __future__ import annotations


class ArgumentError(TypeError, ValueError):
    """A call that does not fit: a shape, a dtype, a keyword. Raised while the call is traced."""


class RefusedError(RuntimeError):
    """Under ``config(strict=True)``: jax would have run what the kernels refuse. The message says why they do."""
