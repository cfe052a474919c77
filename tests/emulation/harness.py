"""The emulated extension in place of the compiled one."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from emulation import build
from torch.utils.weak import TensorWeakRef

from fusible.benchmarks import stub_extension
from fusible.ops.kernels.hopper.pointwise import KernelForm
from fusible.ops.kernels.jit import epilogue, quantized


class Emulation:
    """`fusible.ops._C` on the CPU.

    Bulk copies may touch the storages of all tensors that live when a call is made.
    """

    def __init__(self, module: Path) -> None:
        spec = importlib.util.spec_from_file_location("_C", module)
        assert spec is not None
        assert spec.loader is not None
        gc.collect()
        gc.freeze()  # what lives by now is not asked for its storage at every call
        self._path = module
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self._library = ctypes.CDLL(str(module))
        self._hidden = 0
        self._tensors: list[TensorWeakRef] = []
        self._most = 500
        self.functions: dict[str, int] = {}  # the handles of kernels by their sources
        self.streams: list[int] = []  # of replays
        self.peak = 0  # the most bytes of tensors that lived when a call was made
        self._library.emulation_add_memory.argtypes = [ctypes.c_uint64, ctypes.c_uint64]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._call(value) if callable(value) else value

    def Capture(self, spans: list[tuple[int, int]], rows: int, owned: Sequence[int] = ()) -> Any:
        return _Capture(self._module.Capture(spans, rows, owned), self)

    def load_function(self, texts: Sequence[str]) -> int:
        """The handle of the kernel of the last of the sources: in place of NVRTC and the driver."""
        text = texts[-1]
        if text not in self.functions:
            self.functions[text] = ctypes.cast(self.library(text).kernel, ctypes.c_void_p).value or 0
        return self.functions[text]

    def library(self, text: str) -> ctypes.CDLL:
        """A source that the extension would compile at run time, compiled by g++."""
        return ctypes.CDLL(str(build.build_function(text, self._path)))

    def kernel_function(self, form: KernelForm, device: int) -> int:
        """The handle of a kernel that is compiled while the program runs: its address."""
        return self.load_function([form.source()])

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._show_memory()
            return function(*arguments, **named)

        return call

    def _show_memory(self) -> None:
        """Looks at each new object once and freezes it; of those, tensors that live are asked for their storages."""
        kinds = torch.Tensor, torch.nn.Parameter
        self._tensors += [TensorWeakRef(thing) for thing in gc.get_objects() if type(thing) in kinds]
        gc.freeze()
        if len(self._tensors) > self._most:  # cycles among them: frozen, they are not collected
            freeze()
        alive = [(reference, tensor) for reference in self._tensors if (tensor := reference()) is not None]
        self._tensors = [reference for reference, _ in alive]
        self._most = max(self._most, 2 * len(alive))
        self._library.emulation_clear_memory()
        storages = {(s.data_ptr(), s.nbytes()) for s in (tensor.untyped_storage() for _, tensor in alive)}
        self.peak = max(self.peak, sum(size for _, size in storages))
        for address, size in storages:
            if address != self._hidden:
                self._library.emulation_add_memory(address, size)

    def allocated(self, allocate: Callable[..., torch.Tensor], *sizes: int) -> torch.Tensor:
        """Between launches of a replay, some of whose tensors may be gone by then."""
        tensor = allocate(*sizes)
        self._show_memory()
        return tensor

    def kernels_beside(self) -> int:
        """How many kernels so far have gone on beside the one before them."""
        return int(self._library.emulation_kernels_beside())

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


class _Capture:
    """A capture of the extension; replays of its launches note their streams."""

    def __init__(self, capture: Any, emulation: Emulation) -> None:
        self._capture, self._emulation = capture, emulation

    def __enter__(self) -> _Capture:
        self._capture.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)

    def launches(self, first: _Capture | None, large: int) -> Any:
        launches, emulation = self._capture.launches(first and first._capture, large), self._emulation

        def run(tensors: list[Any], memory: list[Any], function: int, rows: int, stream: int) -> None:
            emulation.streams.append(stream)
            emulation._show_memory()
            shown = [(partial(emulation.allocated, allocate), rest) for allocate, rest in memory]
            launches.run(tensors, shown, function, rows, stream)

        return SimpleNamespace(run=run, for_any_rows=launches.for_any_rows)


def freeze() -> None:
    """Excludes living objects from garbage collection: among all tests, each collection takes a second."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def installed(emulation: object) -> Iterator[None]:
    """The backends believe in a GPU whose tensors are those of the CPU."""
    with stub_extension.installed(emulation), patch.object(epilogue, "load", getattr(emulation, "load_function", None)):
        for forms in (epilogue.handles, quantized.handle):
            forms.cache_clear()
        yield
        for forms in (epilogue.handles, quantized.handle):
            forms.cache_clear()
