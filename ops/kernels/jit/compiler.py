"""The interface of a CUDA compiler, and its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

_FORBIDDEN = re.compile(r"[1-9]\d* bytes spill|\bC7[56]\d\d\b.*")


class CompileError(RuntimeError):
    """A source does not compile, ptxas would make it slow, or there is no compiler."""


class SpillError(CompileError):
    """The code needs more registers than a thread has."""


class Compiler(Protocol):
    """NVRTC or nvcc.

    Attributes:
        version: name, release and options: what compiled code depends on besides its source.
    """

    version: tuple[str, ...]

    def compile(self, source: str, headers: Mapping[str, str], architecture: str) -> bytes:
        """The cubin of a source whose includes are CUDA's, or among the headers.

        Args:
            headers: their texts by the names under which they are included.
            architecture: such as ``"sm_90a"``.

        Raises:
            CompileError: with the compiler's log; also for code that spills registers.
        """
        ...


def raise_for(failed: bool, log: str) -> None:
    """Raises the error that a compiler's log shows.

    Raises:
        CompileError: the compiler failed, or ptxas serialised wgmma.
        SpillError: the code spills registers.
    """
    forbidden = _FORBIDDEN.search(log)
    if forbidden:
        error = SpillError if "spill" in forbidden[0] else CompileError
        raise error(f"ptxas: {forbidden[0]}")
    if failed:
        raise CompileError(log)
