"""CUDA sources to code of a GPU: NVRTC, which PyTorch for CUDA brings with it, called through ctypes."""

from __future__ import annotations

import ctypes
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from .shims import SHIMS

_FORBIDDEN = re.compile(r"[1-9]\d* bytes spill|\bC7[56]\d\d\b.*")
_OPTIONS = (
    "--std=c++20",
    "-default-device",
    "--no-cache",  # from which the log would be empty
    "--ptxas-options=-v",
    "-DINFINITY=__int_as_float(0x7f800000)",
    "-DNAN=__int_as_float(0x7fffffff)",
)
_SHIMS_DIGEST = sha256(repr(sorted(SHIMS.items())).encode()).hexdigest()


class CompileError(RuntimeError):
    """A source does not compile, ptxas would make it slow, or there is no compiler."""


class SpillError(CompileError):
    """The code needs more registers than a thread has."""


class Nvrtc:
    """NVRTC of one folder. It reads no header from disk.

    Attributes:
        version: name, release and options: what compiled code depends on besides its source.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version: tuple[str, ...] = "NVRTC", f"{major.value}.{minor.value}", *_OPTIONS, _SHIMS_DIGEST

    def compile(self, source: str, headers: Mapping[str, str], architecture: str) -> bytes:
        """The cubin of a source whose includes are CUDA's, or among the headers.

        Args:
            headers: their texts by the names under which they are included.
            architecture: such as ``"sm_90a"``.

        Raises:
            CompileError: with the compiler's log; also for code that spills registers.
        """
        headers, options = {**SHIMS, **headers}, (f"--gpu-architecture={architecture}", *_OPTIONS)
        program = ctypes.c_void_p()
        texts, names = _strings([*headers.values()]), _strings([*headers])
        create = self._library.nvrtcCreateProgram
        self._check(create(ctypes.byref(program), source.encode(), b"kernel.cu", len(headers), texts, names))
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode()
            _raise_for(bool(failed), log)
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


def _raise_for(failed: bool, log: str) -> None:
    """Raises the error that a log shows; wgmma that ptxas has serialised is one."""
    forbidden = _FORBIDDEN.search(log)
    if forbidden:
        error = SpillError if "spill" in forbidden[0] else CompileError
        raise error(f"ptxas: {forbidden[0]}")
    if failed:
        raise CompileError(log)


def find() -> Nvrtc | None:
    """The first NVRTC that can be loaded: as a Python package, or in a CUDA toolkit."""
    for folder in _folders():
        for library in sorted(folder.glob("libnvrtc.so.*"), reverse=True):
            with suppress(OSError):
                for builtins in folder.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # NVRTC finds it by name only if it is loaded
                return Nvrtc(ctypes.CDLL(str(library)))
    return None


def _folders() -> Iterator[Path]:
    for packages in (Path(torch.__file__).parents[1], Path(sysconfig.get_paths()["purelib"])):
        yield from sorted(packages.glob("nvidia/cu*/lib"), reverse=True)
        yield packages / "nvidia" / "cuda_nvrtc" / "lib"
    yield Path("/usr/local/cuda/lib64")


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])
