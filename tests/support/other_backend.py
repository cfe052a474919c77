"""The suite under ``FUSIBLE_BACKEND=triton`` and the like: which tests cannot hold, as they say themselves.

Tests that name a backend get it. Of the others, one is skipped if it is marked ``hopper``, if the backend refuses what
it computes, or if the statement that fails is about our Hopper kernels; every other failure is one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusible.fuser import RefusedError
from fusible.ops.values.switches import active_switches

TESTS = Path(__file__).parents[1]
HOPPER = ("auto", "hopper")
OF_HOPPER = re.compile("hopper|replay", re.IGNORECASE)  # its kernels alone are replayed for any number of rows


def of_run() -> str:
    """The backend that ``FUSIBLE_BACKEND`` names for all tests; ``auto`` without one, and where a fixture names one."""
    backend: str = os.environ.get("FUSIBLE_BACKEND", "auto")
    return backend if backend == active_switches().backend else "auto"


def reason(error: BaseException, backend: str) -> str | None:
    """Why a test that ended with this error does not hold under this backend; None: it should."""
    if backend in HOPPER:
        return None
    for each in _chain(error):
        if isinstance(each, RefusedError) and backend in str(each):
            return f"{backend} refuses: {each}"
    traceback = pytest.ExceptionInfo.from_exception(error).traceback
    entries = [entry for entry in traceback if TESTS in Path(entry.path).parents]
    statement = " ".join(str(entries[-1].statement).split()) if entries else ""
    if OF_HOPPER.search(statement) and not isinstance(error, TypeError | NameError | AttributeError | ImportError):
        return f"is about our Hopper kernels: {statement}"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
