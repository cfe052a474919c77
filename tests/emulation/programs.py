"""Many programs inside emulated kernels that are compiled once: a kernel calls what is set before its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from emulation.harness import Emulation

from fusible.ops.kernels.jit import epilogue
from fusible.ops.programs.cpp import boolean, function_type
from fusible.ops.programs.program import Program

_DIRECTIONS = {"forward": "float", "backward": "Gradients<1>"}
_PARAMETERS = {"forward": "float x, float u, const float* r", "backward": "float x, float u, const float* r, float dy"}
_ARGUMENTS = {"forward": "x, u, r", "backward": "x, u, r, dy"}


class Programs:
    """Programs of one number of the row, all in one library; and the kernels that call the one that is chosen."""

    def __init__(self, emulation: Emulation, programs: Sequence[Program]) -> None:
        self._emulation, self._programs = emulation, programs
        self._library = emulation.library(_library(programs))

    @contextmanager
    def chosen(self, i: int) -> Iterator[None]:
        """The kernels that are asked for are those of program number ``i``."""

        def load(texts: Sequence[str]) -> int:
            own, shared = function_type(self._programs[i]), _caller("u" in self._programs[i].inputs)
            assert own in texts[-1]
            kernel = self._emulation.library(texts[-1].replace(own, shared))
            for direction in _DIRECTIONS:
                code = getattr(self._library, f"{direction}_{i}")
                ctypes.c_void_p.in_dll(kernel, f"chosen_{direction}").value = ctypes.cast(code, ctypes.c_void_p).value
            return ctypes.cast(kernel.kernel, ctypes.c_void_p).value or 0

        epilogue.handles.cache_clear()
        with patch.object(epilogue, "load", load):
            yield
        epilogue.handles.cache_clear()


def _library(programs: Sequence[Program]) -> str:
    text = '#include "device/functions/pointwise.cuh"\n'
    for i, program in enumerate(programs):
        text += f"namespace fusible::program{i} {{\n{function_type(program)}}}\nnamespace fusible {{\n"
        for direction, result in _DIRECTIONS.items():
            called = f"program{i}::Function::{direction}({_ARGUMENTS[direction]})"
            text += f'extern "C" {result} {direction}_{i}({_PARAMETERS[direction]}) {{ return {called}; }}\n'
        text += "}\n"
    return text


def _caller(gated: bool) -> str:
    """In place of a program's type, one whose members call what is set."""
    pointers = members = ""
    for direction, result in _DIRECTIONS.items():
        pointers += f'extern "C" {{ {result} (*chosen_{direction})({_PARAMETERS[direction]}); }}\n'
        call = f"chosen_{direction}({_ARGUMENTS[direction]})"
        members += f"  DEVICE static {result} {direction}({_PARAMETERS[direction]}) {{ return {call}; }}\n"
    return f"""{pointers}struct Function {{
  static constexpr bool kGated = {boolean(gated)};
  static constexpr int kRows = 1, kColumns = 0, kMatrices = 0, kConstants = 0, kVectors = 1;
{members}}};
"""
