"""Other kernels in place of those that backends have registered, and what is chosen of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from fusible.ops.kernels import dispatch
from fusible.ops.kernels.problems import kinds
from fusible.ops.kernels.problems.interface import Kernels, Kind
from fusible.ops.kernels.pytorch import backend, grouped_mm


@contextmanager
def asked(kind: Kind[Any], *kernels: Kernels[Any]) -> Iterator[None]:
    """These alone are asked to solve a kind of problem."""
    before = list(kind.kernels)
    kind.kernels[:] = kernels
    dispatch.register(())
    try:
        yield
    finally:
        kind.kernels[:] = before
        dispatch.register(())


def runner(problem: Any, tracing: bool = False) -> Any:
    """What will be called with the problem."""
    return dispatch.choose(problem, tracing).kernels.run


@contextmanager
def grouped_mm_on_cpu() -> Iterator[None]:
    """``grouped_mm`` and its passes over rows run on a CPU as they do on a GPU, where nothing refuses."""
    gemm = replace(backend._GROUPED_MM, device=None, refusal=lambda p: grouped_mm.refusal(p))
    rows = {kind: replace(kernels, device=None) for kind, kernels in backend._row_kernels(grouped_mm, None)}
    with ExitStack() as stack:
        stack.enter_context(asked(kinds.GEMM, gemm, backend._LOOP))
        for kind, kernels in rows.items():
            stack.enter_context(asked(kind, kernels))
        yield
