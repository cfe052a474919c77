"""Other kernels in place of those that backends have registered, and what is chosen of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fusible.ops.kernels import dispatch
from fusible.ops.kernels.problems import kinds
from fusible.ops.kernels.problems.interface import Implementation, Kind
from fusible.ops.kernels.pytorch import backend, grouped_mm


@contextmanager
def asked(kind: Kind[Any], *kernels: Implementation[Any]) -> Iterator[None]:
    """These alone are asked to solve a kind of problem."""
    before = list(kind.kernels)
    kind.kernels[:] = kernels
    dispatch.register(())
    try:
        yield
    finally:
        kind.kernels[:] = before
        dispatch.register(())


@contextmanager
def noted(kind: Kind[Any]) -> Iterator[list[Any]]:
    """The problems that the first kernels of a kind solve, which are asked alone."""
    own, solved = kind.kernels[0], list[Any]()
    with asked(kind, replace(own, run=lambda p: (solved.append(p), own.run(p)))):  # type: ignore[arg-type]
        yield solved


def runner(problem: Any, tracing: bool = False) -> Any:
    """What will be called with the problem."""
    return dispatch.choose(problem, tracing).kernels.run


@contextmanager
def grouped_mm_on_cpu() -> Iterator[None]:
    """``grouped_mm`` and its passes over rows run on a CPU as they do on a GPU, where nothing refuses."""
    gemm = replace(backend.GROUPED_MM, device=None, refusal=lambda p: grouped_mm.refusal(p))
    rows = replace(backend.ROWS_OF_GROUPED_MM, device=None)
    with asked(kinds.GEMM, gemm, backend.LOOP), asked(kinds.ROW_PASS, rows):
        yield
