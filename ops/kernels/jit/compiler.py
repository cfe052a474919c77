"""What a compiler of CUDA sources does, and what it raises."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

_FORBIDDEN = re.compile(r"[1-9]\d* bytes spill|\bC7[56]\d\d\b.*")


class CompileError(RuntimeError):
    """A source does not compile, or ptxas would make it slow; or there is no compiler."""


class SpillError(CompileError):
    """The code needs more registers than there are."""


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
    """Raises what a compiler's log calls for.

    Raises:
        CompileError: the compiler failed, or ptxas serialised what shall run at once.
        SpillError: the code spills registers.
    """
    forbidden = _FORBIDDEN.search(log)
    if forbidden:
        error = SpillError if "spill" in forbidden[0] else CompileError
        raise error(f"ptxas: {forbidden[0]}")
    if failed:
        raise CompileError(log)
