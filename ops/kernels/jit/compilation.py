"""Compiles sources that include headers of csrc for a GPU, or finds them in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

import torch

from . import nvrtc
from .cache import kernel_cache, key_of
from .nvrtc import CompileError, Nvrtc, SpillError

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The types of elements in C++."""
_HEADERS = (("device", ".cuh"), ("kernels", ".cuh"), ("kernels", ".h"), ("fusible", ".h"))


def compiled(texts: Sequence[str], architecture: str) -> bytes:
    """The cubin of the first of the sources that does not spill registers, kept under all of them.

    Raises:
        CompileError: see :func:`compiler`, :meth:`Nvrtc.compile`.
    """

    def compile_first() -> bytes:
        for text in texts[:-1]:
            with suppress(SpillError):
                return compiler().compile(text, _headers(), architecture)
        return compiler().compile(texts[-1], _headers(), architecture)

    return kernel_cache().find(key_of(*texts, _headers_digest(), architecture, compiler().version), compile_first)


@cache
def compiler() -> Nvrtc:
    """The first NVRTC found as a Python package or in a CUDA toolkit.

    Raises:
        CompileError: there is none.
    """
    available = nvrtc.find()
    if available is None:
        raise CompileError("NVRTC is not installed; pip install nvidia-cuda-nvrtc")
    return available


@cache
def _headers() -> dict[str, str]:
    """The headers of csrc, by their paths in it."""
    csrc = files("fusible") / "csrc"
    return {
        path: header.read_text()
        for folder, suffix in _HEADERS
        for path, header in _files_below(folder, csrc / folder)
        if path.endswith(suffix)
    }


def _files_below(path: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    """The files of a folder and its subfolders, with their paths."""
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        yield from _files_below(name, entry) if entry.is_dir() else ((name, entry),)


@cache
def _headers_digest() -> str:
    return sha256(repr(sorted(_headers().items())).encode()).hexdigest()
