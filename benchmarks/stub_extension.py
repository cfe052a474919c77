"""A stub in place of the CUDA extension, so that the path of a GPU can be followed on a CPU. Nothing is computed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

import fusible.ops
from fusible.fuser.compiler import plan
from fusible.fuser.replay import calls
from fusible.ops import kernels


class NothingLaunched:
    """Takes every launch, and does nothing."""

    names = "linear_activation", "linear_activation_backward", "grouped_gemm", "zero_tail"
    LAUNCHES = dict.fromkeys(names, ())

    def Launches(self) -> NothingLaunched:
        return self

    def RoutedMlp(self, *_: Any) -> NothingLaunched:
        return self

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 16


@contextmanager
def _imported_as(name: str, module: Any) -> Iterator[None]:
    """One entry of ``sys.modules``; the others stay, also those that are added meanwhile."""
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
    """The kernels take tensors of the CPU for those of a GPU, and find this extension."""
    answers = {"library": lambda: extension, "stream": lambda device: 0, "device_refusal": lambda device: None}
    with ExitStack() as patches:
        patches.enter_context(_imported_as("fusible.ops._C", extension))
        patches.enter_context(patch.object(fusible.ops, "_C", extension, create=True))
        patches.enter_context(patch.object(torch.Tensor, "get_device", lambda tensor: 0))
        patches.enter_context(patch.object(torch.Tensor, "is_cuda", True))
        for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            module = importlib.import_module(found.name)
            for function in answers.keys() & vars(module).keys():
                patches.enter_context(patch.object(module, function, answers[function]))
        yield


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Calls are captured and replayed as on a GPU; the stub takes the launches."""
    with (
        installed(NothingLaunched()),
        patch.object(plan, "_checks_values", lambda graph, config: False),
        patch.object(calls, "is_replayed_for", lambda tensor: True),
    ):
        yield
