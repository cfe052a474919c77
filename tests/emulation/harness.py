"""The emulated extension in place of the compiled one."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusible.ops
from fusible.ops import kernels


class Emulation:
    """What `fusible.ops._C` is, on the CPU.

    Bulk copies may touch the storages of all tensors that live when a call is made.
    """

    def __init__(self, module: Path) -> None:
        spec = importlib.util.spec_from_file_location("_C", module)
        assert spec is not None
        assert spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self._library = ctypes.CDLL(str(module))
        self._hidden = 0
        self._library.emulation_add_memory.argtypes = [ctypes.c_uint64, ctypes.c_uint64]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._call(value) if callable(value) else value

    def Launches(self) -> Any:
        launches = self._module.Launches()
        return SimpleNamespace(
            run=self._call(launches.run), **{name: getattr(launches, name) for name in self._module.LAUNCHES}
        )

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._show_memory()
            return function(*arguments, **named)

        return call

    def _show_memory(self) -> None:
        self._library.emulation_clear_memory()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
        for address, size in {(s.data_ptr(), s.nbytes()) for s in map(torch.Tensor.untyped_storage, tensors)}:
            if address != self._hidden:
                self._library.emulation_add_memory(address, size)

    @contextmanager
    def without(self, tensor: torch.Tensor) -> Iterator[None]:
        """Copies may not touch this tensor."""
        self._hidden = tensor.untyped_storage().data_ptr()
        try:
            yield
        finally:
            self._hidden = 0

    @contextmanager
    def shuffled(self, seed: int) -> Iterator[None]:
        """The threads of a launch take turns in another order than that of their numbers."""
        self._library.emulation_set_seed(seed)
        try:
            yield
        finally:
            self._library.emulation_set_seed(0)


@contextmanager
def installed(emulation: Emulation) -> Iterator[None]:
    """The backends believe in a GPU whose tensors are those of the CPU."""
    answers = {"library": lambda: emulation, "stream": lambda device: 0, "device_refusal": lambda device: None}
    gc.freeze()  # what is older than the tests is not asked for its storage at every call
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fusible.ops._C", emulation)  # type: ignore[arg-type]
        patch.setattr(fusible.ops, "_C", emulation, raising=False)
        patch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
        patch.setattr(torch.Tensor, "is_cuda", True)
        for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            module = importlib.import_module(found.name)
            for function in answers.keys() & vars(module).keys():
                patch.setattr(module, function, answers[function])
        yield
    gc.unfreeze()
