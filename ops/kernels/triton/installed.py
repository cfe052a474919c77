"""Whether Triton is there, and for which devices. Importing this does not import it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ....fuser.replay.capture import Capture
from ..architecture import Capability, assumed, capability_of

NAME = "triton"
OLDEST = Capability(8, 0)
MAX_GROUPS = 4096  # sizes that a program reads at once
MAX_ROWS = 2**30 - 1
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def is_installed() -> bool:
    """Whether Triton is."""
    return find_spec("triton") is not None


@cache
def missing_to_build() -> str | None:
    """The part that Triton lacks to build the launcher of a kernel, as containers without development files do."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler (gcc or clang)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    return None if header.exists() else f"the header {header}, of python3-dev"


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_refusal(rows: Tensor) -> str | None:
    """Why no kernel runs where these rows are; None: some do."""
    on_cuda = rows.device.type == "cuda"
    if not on_cuda and not (is_interpreted() and rows.device.type == "cpu"):
        return f"needs a CUDA device, got {rows.device.type}"
    if assumed() is None and not is_installed():
        return "is not installed (pip install triton)"
    if on_cuda and assumed() is None and (part := missing_to_build()) is not None:
        return f"needs {part} to build its launchers"
    if on_cuda and torch.version.hip is None and (capability := capability_of(rows.device)) < OLDEST:
        return f"needs compute capability {OLDEST} or above, got {capability}"
    return None


def launches_on(rows: Tensor) -> AbstractContextManager[object]:
    """Makes the device of these rows current, as Triton launches on it."""
    return torch.cuda.device(rows.device) if rows.device.type == "cuda" else nullcontext()


def report_word(split_sizes: Tensor) -> int:
    """The address of the word in which kernels report wrong split sizes, as the extension's do; 0: there is none."""
    library = Capture.find_library() if split_sizes.is_cuda else None
    return 0 if library is None else int(library.wrong_size_word(split_sizes.get_device()))


def groups_refusal(split_sizes: Tensor, rows: int) -> str | None:
    """Why the kernels do not take these sizes of groups, with so many rows; None: they do."""
    groups = split_sizes.shape[0]
    if not 1 <= groups <= MAX_GROUPS or rows > MAX_ROWS:
        return f"takes 1 to {MAX_GROUPS} groups and at most {MAX_ROWS} rows, got {groups} and {rows}"
    if split_sizes.dtype not in (torch.int32, torch.int64) or not split_sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    return None
