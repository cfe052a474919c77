"""The handlers and the kernels' sources on the CPU: the emulated extension as that of ``fusible.jax``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

from emulation import build

import fusible.jax
from fusible.jax import extension


@cache
def kernels() -> extension.Kernels:
    """Registered for XLA's CPU."""
    spec = importlib.util.spec_from_file_location("_C", build.build())
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    found = extension.Kernels(library, "cpu")
    extension.register(found)
    return found


@contextmanager
def installed() -> Iterator[None]:
    """In the body, what is traced on the CPU runs the kernels, or raises."""
    with (
        patch.object(extension, "kernels", kernels),
        patch.object(extension, "unavailable", lambda: None),
        fusible.jax.config(backend="hopper", strict=True),
    ):
        yield
