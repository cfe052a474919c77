"""A process in which Triton's kernels are not interpreted; one for many scripts, as each imports for seconds."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context

import pytest

Compile = Callable[..., list[str]]
CARDS = {
    **{"sm_80": "mma.sync", "sm_86": "mma.sync", "sm_89": "mma.sync", "sm_120": "mma.sync"},
    **{"sm_90": "wgmma", "sm_100": "tcgen05", "sm_103": "tcgen05", "gfx942": "v_mfma", "gfx950": "v_mfma"},
}
"""The instruction of each card that multiplies matrices."""


def spilled(line: str) -> int:
    """The spilled bytes of a kernel, in the line about it."""
    return int(re.search(r"(\d+) spilled", line)[1])  # type: ignore[index]


@contextmanager
def started(cache: str) -> Iterator[Compile]:
    """In the body, runs a script of this folder there with its arguments, and returns the lines that it prints."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:

        def compiled(*arguments: str, script: str = "triton_ahead") -> list[str]:
            return process.submit(_printed, script, arguments, cache).result()

        yield compiled


def _printed(script: str, arguments: tuple[str, ...], cache: str) -> list[str]:
    """The output of the script in the process, which imports Triton only now."""
    os.environ.update(TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache)
    with redirect_stdout(io.StringIO()) as printed:
        import_module(script).main(arguments)
    return printed.getvalue().splitlines()
