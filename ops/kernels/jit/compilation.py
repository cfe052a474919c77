"""Sources that include headers of csrc to code of a GPU, from the cache or from NVRTC."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files

from .cache import kernel_cache, key_of
from .nvrtc import compiler
from .shims import SHIMS

_OPTIONS = (
    "--std=c++20",
    "-default-device",
    "--no-cache",  # from which the log would be empty
    "--ptxas-options=-v",
    "-DINFINITY=__int_as_float(0x7f800000)",
    "-DNAN=__int_as_float(0x7fffffff)",
)
_HEADERS = (("device", ".cuh"), ("kernels", ".cuh"), ("kernels", ".h"), ("fusible", ".h"))


def compiled(text: str, architecture: str) -> bytes:
    """The cubin of a source.

    Raises:
        CompileError: see :func:`nvrtc.compiler`, :meth:`nvrtc.Compiler.compile`.
    """
    options = (f"--gpu-architecture={architecture}", *_OPTIONS)
    key = key_of(text, _headers_digest(), options, compiler().version)
    return kernel_cache().find(key, lambda: compiler().compile(text, _headers(), options))


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
