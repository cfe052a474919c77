"""Sources that include headers of csrc to code of a GPU, from the cache or from NVRTC."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files

import torch

from .cache import kernel_cache, key_of
from .nvrtc import SpillError, compiler
from .shims import SHIMS

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The types of elements in C++."""
_OPTIONS = (
    "--std=c++20",
    "-default-device",
    "--no-cache",  # from which the log would be empty
    "--ptxas-options=-v",
    "-DINFINITY=__int_as_float(0x7f800000)",
    "-DNAN=__int_as_float(0x7fffffff)",
)
_HEADERS = (("device", ".cuh"), ("kernels", ".cuh"), ("kernels", ".h"), ("fusible", ".h"))


def compiled(texts: Sequence[str], architecture: str) -> bytes:
    """The cubin of the first of the sources that does not spill registers, kept under all of them.

    Raises:
        CompileError: see :func:`nvrtc.compiler`, :meth:`nvrtc.Compiler.compile`.
    """
    options = (f"--gpu-architecture={architecture}", *_OPTIONS)

    def compile_first() -> bytes:
        for text in texts[:-1]:
            with suppress(SpillError):
                return compiler().compile(text, _headers(), options)
        return compiler().compile(texts[-1], _headers(), options)

    return kernel_cache().find(key_of(*texts, _headers_digest(), options, compiler().version), compile_first)


@cache
def _headers() -> dict[str, str]:
    """Those of csrc, and what stands for the headers of others."""
    csrc = files("fusible") / "csrc"
    headers = {
        f"{folder}/{path.name}": path.read_text()
        for folder, suffix in _HEADERS
        for path in (csrc / folder).iterdir()
        if path.name.endswith(suffix)
    }
    return {**SHIMS, **headers}


@cache
def _headers_digest() -> str:
    return sha256(repr(sorted(_headers().items())).encode()).hexdigest()
