"""A stub in place of the CUDA extension, so that the path of a GPU can be followed on a CPU. Nothing is computed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any
from unittest.mock import patch

import torch

import fusible.ops
from fusible.fuser import replay
from fusible.fuser.replay.capture import Allocation
from fusible.ops import kernels


class NothingLaunched:
    """Accepts every launch and does nothing."""

    def Capture(self, spans: list[tuple[int, int]], rows: int, owned: Sequence[int]) -> NothingCaptured:
        return NothingCaptured(spans, rows)

    def has_objects(self, values: dict[str, Any], names: tuple[str, ...], objects: tuple[Any, ...]) -> bool:
        return all(map(is_, map(values.get, names), objects))

    def tensor_addresses(self, tensors: Sequence[torch.Tensor], function: int) -> bytes:
        return array("Q", map(torch.Tensor.data_ptr, tensors)).tobytes()

    def refuse(self, reason: str) -> None:
        if NothingCaptured.active is not None:
            NothingCaptured.active.refuse(reason)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments, **fields: 16


class NothingCaptured:
    """Records no launch. It identifies memory by its first address."""

    active: NothingCaptured | None = None
    refusal: str | None = None

    def __init__(self, spans: list[tuple[int, int]], rows: int) -> None:
        self._firsts, self._inputs = [first for first, _ in spans], len(spans)
        self.rows, self.first_sizes = rows, list[int]()

    def __enter__(self) -> None:
        NothingCaptured.active = self

    def __exit__(self, *error: object) -> None:
        NothingCaptured.active = None

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def allocated(self, address: int, nbytes: int, per_row: bool) -> bool:
        self._firsts.append(address)
        return False

    def result(self, address: int, nbytes: int, first_size: int) -> int:
        latest = {first: number for number, first in enumerate(self._firsts)}
        number = latest.get(address, -1)
        if number < self._inputs:
            return number
        self.first_sizes.append(first_size)
        return self._inputs + len(self.first_sizes) - 1

    def launches(self, first: NothingCaptured | None, large: int) -> NothingReplayed:
        return NothingReplayed(self if first is None else first, self)


class NothingReplayed:
    """The result of two captures: the sizes of results, and a small scratch buffer."""

    def __init__(self, first: NothingCaptured, second: NothingCaptured) -> None:
        sizes = zip(first.first_sizes, second.first_sizes, strict=True)
        self._counts = [(a, 0) if a == b else (0, a // first.rows) for a, b in sizes]
        self.for_any_rows = first.rows != second.rows

    def run(self, tensors: list[Any], memory: list[Allocation], function: int, rows: int, stream: int) -> None:
        sizes = [*[fixed + per_row * rows for fixed, per_row in self._counts], 16]
        for size, (allocate, rest) in zip(sizes, memory, strict=True):
            tensors += (allocate(size, *rest),)


@contextmanager
def _imported_as(name: str, module: Any) -> Iterator[None]:
    """Replaces one entry of ``sys.modules`` within the body, and restores only that."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextmanager
def installed(extension: object) -> Iterator[None]:
    """Makes kernels treat CPU tensors as GPU tensors and use this extension."""
    answers = {
        "library": lambda: extension,
        "is_built": lambda: True,
        "stream": lambda device: 0,
        "device_refusal": lambda device: None,
        "kernel_function": lambda *form: extension.kernel_function(*form),  # type: ignore[attr-defined]
    }
    with ExitStack() as patches:
        patches.enter_context(_imported_as("fusible.ops._C", extension))
        patches.enter_context(patch.object(fusible.ops, "_C", extension, create=True))
        patches.enter_context(patch.object(torch.Tensor, "get_device", lambda tensor: 0))
        patches.enter_context(patch.object(torch.Tensor, "is_cuda", True))
        for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            if info.name.startswith(f"{kernels.__name__}.triton."):
                continue  # asks the extension for nothing
            module = importlib.import_module(info.name)
            for function in answers.keys() & vars(module).keys():
                patches.enter_context(patch.object(module, function, answers[function]))
        yield


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Captures and replays calls as on a GPU; the stub accepts the launches."""
    with installed(NothingLaunched()), replay.simulated("cpu"):
        yield
