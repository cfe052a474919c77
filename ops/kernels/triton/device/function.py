"""A program as a function that kernels call."""

from __future__ import annotations

import linecache
from functools import lru_cache
from hashlib import sha256

from ....programs.program import Program
from ....programs.triton import function_source

_HEAD = f"""import triton
import triton.language as tl

from {__package__}.functions import atan, expm1, log1p, power, rint, sigmoid, tanh


@triton.jit
"""


@lru_cache(maxsize=1024)
def function(program: Program, outputs: tuple[str, ...]) -> object:
    """The jitted function ``f(x, u, dy, rows, columns, matrices)`` that returns these outputs of a program.

    Triton reads the text of a function from its file, which here is an entry of :mod:`linecache`.
    """
    text = _HEAD + function_source(program, outputs)
    name = f"<fusible {sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope: dict[str, object] = {"__name__": "fusible_function"}
    exec(compile(text, name, "exec"), scope)
    return scope["f"]
