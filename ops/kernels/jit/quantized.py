"""Pointwise programs in kernels that quantise their results: as the epilogue of a product of e4m3 operands, or over
rows of a product.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...programs.cpp import boolean, function_type
from ...programs.program import Program
from ..extension import library
from . import epilogue
from .compilation import ELEMENTS, compiled
from .operands import one_function

_STORE_REGISTERS = 72, 88
"""Registers of a thread that computes an epilogue. One function needs fewer than a choice among all built-in ones, and
the registers left for the threads that multiply decide whether these spill."""
_BLOCKS = {False: (3, 2, 1), True: (2, 1)}
"""Blocks of a multiprocessor, by whether it is a backward: the fewer, the more registers has a thread."""


class ScaledForm(NamedTuple):
    """The compile-time form of the epilogue of a product of e4m3 operands.

    Attributes:
        dtype: the dtype of the product.
        concat, narrow, scale_bias, vectors, scales: as of :class:`EpilogueForm`.
    """

    program: Program
    dtype: torch.dtype
    concat: bool
    narrow: bool
    scale_bias: bool
    vectors: tuple[torch.dtype, ...] = ()
    scales: bool = True

    def sources(self) -> list[str]:
        """The CUDA sources of the kernel, in order of preference; the first that does not spill is used."""
        return [self.source(registers) for registers in _STORE_REGISTERS]

    def source(self, registers: int) -> str:
        weights = "GateUpRows" if self.concat else "WeightRows"
        functions = one_function(self.program, self.narrow, self.scales, self.vectors, sums_vectors=False)
        definitions = f"""{function_type(self.program)}
using T = {ELEMENTS[self.dtype]};
using Epilogue = QuantizedActivationEpilogue<{boolean(self.concat)}, {functions}, {registers}>;
using Weights = {weights}<E4M3, kScaledVariant.tile_n>;
using Kernel = GroupedGemmKernel<TokenRows<E4M3>, Weights, T, {boolean(self.scale_bias)}, kScaledVariant, Epilogue,
                                 TokenGroups, Scaling1D2D>;
"""
        parameters = library().SCALED_ACTIVATION_PARAMS_BYTES
        return epilogue.gemm_source("epilogue_quantized_activation", definitions, parameters)


class QuantizerForm(NamedTuple):
    """The compile-time form of a kernel over rows.

    Attributes:
        backward: whether it is the backward.
        dtype: the dtype of the rows.
        narrow, vectors, sums_vectors, scales: as for :class:`EpilogueForm`.
    """

    program: Program
    backward: bool
    dtype: torch.dtype
    narrow: bool
    vectors: tuple[torch.dtype, ...] = ()
    sums_vectors: bool = False
    scales: bool = True

    def sources(self) -> list[str]:
        """The CUDA sources of the kernel, in order of preference; the first that does not spill is used."""
        return [self.source(blocks) for blocks in _BLOCKS[self.backward]]

    def source(self, blocks: int) -> str:
        gated, operands = len(self.program.arguments) == 2, (self.vectors, self.sums_vectors)
        functions = one_function(self.program, self.narrow, self.scales, *operands)
        form = "kNone" if not gated else "kNarrow" if self.narrow else "kWide"
        direction, size = ("Backward", "_BACKWARD") if self.backward else ("", "")
        memory = "extern __shared__ __align__(16) char memory[];" if self.backward else ""
        shared = ", *reinterpret_cast<fusible::BackwardShared*>(memory)" if self.backward else ""
        function = "quantize_activation_backward" if self.backward else "quantize_activation"
        return f"""#include "device/epilogue/epilogue_functions.cuh"
#include "device/quantize/quantize_activation.cuh"
namespace fusible {{
{function_type(self.program)}
using Functions = {functions};
using Call = QuantizeFunction<QuantizeActivation{direction}>;
static_assert(sizeof(Call) == {getattr(library(), f"QUANTIZE_FUNCTION{size}_BYTES")}, "the headers of the extension");
}}  // namespace fusible
extern "C" __global__ void __launch_bounds__(fusible::kQuantizeThreads, {blocks})
    kernel(const __grid_constant__ fusible::Call c) {{
  {memory}
  fusible::{function}<{ELEMENTS[self.dtype]}, fusible::Halves::{form}, fusible::Functions>(c, c.chunks{shared});
}}
"""


QuantizingForm = ScaledForm | QuantizerForm


def refusal(form: QuantizingForm) -> str | None:
    """The reason why there is no kernel; None if it is compiled and loaded."""
    result = handle(form)
    return None if isinstance(result, int) else f"has no kernel of {form.program.name}: {result}"


@lru_cache(maxsize=4096)
def handle(form: QuantizingForm) -> int | str:
    """The handle of the kernel, or the reason why it cannot be compiled.

    Compiled by the first call, unless it is on disk.
    """
    direction = "backward" if isinstance(form, QuantizerForm) and form.backward else "forward"
    loaded = epilogue.loaded(f"quantised {direction} of {form.program.name}", lambda: [epilogue.load(form.sources())])
    return loaded if isinstance(loaded, str) else loaded[0]


def compile_ahead(form: QuantizingForm) -> int:
    """Compiles the kernel of a form into the cache on disk, without a GPU; returns the number of kernels, 1.

    Raises:
        CompileError: see :func:`compiled`.
    """
    compiled(form.sources(), epilogue.ARCHITECTURE)
    return 1
