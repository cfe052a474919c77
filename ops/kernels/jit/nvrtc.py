"""CUDA sources to code of a GPU: NVRTC, which PyTorch for CUDA brings with it, called through ctypes."""

from __future__ import annotations

import ctypes
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FORBIDDEN = re.compile(r"[1-9]\d* bytes spill|\bC7[56]\d\d\b.*")


class CompileError(RuntimeError):
    """A source does not compile, or ptxas would make it slow; or there is no compiler."""


class SpillError(CompileError):
    """The code needs more registers than there are."""


class Compiler:
    """NVRTC of one folder.

    Attributes:
        version: major and minor, a part of what compiled code depends on.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def compile(self, source: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
        """The cubin of a source whose includes are all among the headers.

        Raises:
            CompileError: with the compiler's log; also for code that spills registers.
        """
        program = ctypes.c_void_p()
        texts, names = _strings([*headers.values()]), _strings([*headers])
        create = self._library.nvrtcCreateProgram
        self._check(create(ctypes.byref(program), source.encode(), b"kernel.cu", len(headers), texts, names))
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode()
            forbidden = _FORBIDDEN.search(log)
            if failed or forbidden:
                error = SpillError if forbidden and "spill" in forbidden[0] else CompileError
                raise error(f"ptxas: {forbidden[0]}" if forbidden else log)
            return self._read(program, "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, part: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{part}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{part}")(program, content))
        return content.raw

    def _check(self, status: int) -> None:
        if status:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")


@cache
def compiler() -> Compiler:
    """The first NVRTC that is found: as a Python package, or in a CUDA toolkit.

    Raises:
        CompileError: there is none.
    """
    for folder in _folders():
        libraries = sorted(folder.glob("libnvrtc.so.*"))
        if libraries:
            for builtins in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # NVRTC opens it by name, which finds only what is open
            return Compiler(ctypes.CDLL(str(libraries[-1])))
    raise CompileError("NVRTC is not installed; pip install nvidia-cuda-nvrtc")


def _folders() -> Iterator[Path]:
    for packages in (Path(torch.__file__).parents[1], Path(sysconfig.get_paths()["purelib"])):
        yield from sorted(packages.glob("nvidia/cu*/lib"), reverse=True)
        yield packages / "nvidia" / "cuda_nvrtc" / "lib"
    yield Path("/usr/local/cuda/lib64")


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])
