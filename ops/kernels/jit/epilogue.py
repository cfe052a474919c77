"""Pointwise programs as epilogues of the grouped GEMM: a kernel for each tile that a launch may choose."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import torch

from ...programs.cpp import boolean, function_type
from ...programs.program import Program
from ..extension import library
from ..problems.gemm import Layout
from .compilation import ELEMENTS, compiled
from .driver import LoadedKernel
from .nvrtc import CompileError, SpillError
from .operands import is_concat, is_narrow, one_function

ARCHITECTURE = "sm_90a"
_log = logging.getLogger("fusible")


class EpilogueForm(NamedTuple):
    """The compile-time form of a program's kernels.

    Attributes:
        backward: whether it is the backward's epilogue.
        concat: gate and up are half a row apart, so that a tile of the forward has columns of both.
        narrow: gate and up alternate in blocks narrower than a vector.
        scale_bias: the product has a bias.
        second: the product has a second pair of operands.
        vectors: the types of the inputs that are numbers of columns.
        sums_vectors: the gradients of the numbers of columns are wanted.
        scales: there is a number of the row; without one it is 1.
        matrices: the types of the inputs that are numbers of elements.
    """

    program: Program
    backward: bool
    layout: Layout
    dtype: torch.dtype
    concat: bool
    narrow: bool
    scale_bias: bool
    second: bool = False
    vectors: tuple[torch.dtype, ...] = ()
    sums_vectors: bool = False
    scales: bool = True
    matrices: tuple[torch.dtype, ...] = ()


def blocks_of(program: Program, backward: bool, block: int | None, columns: int) -> tuple[bool, bool]:
    """``concat`` and ``narrow`` for rows of so many columns, of which ``block`` of gate are before as many of up."""
    lies = program, block, columns
    return not backward and is_concat(*lies), is_narrow(*lies)


def refusal(form: EpilogueForm) -> str | None:
    """The reason why there are no kernels; None if they are compiled and loaded."""
    result = handles(form)
    return None if isinstance(result, tuple) else f"has no kernel of {form.program.name}: {result}"


@lru_cache(maxsize=4096)
def handles(form: EpilogueForm) -> tuple[int, ...] | str:
    """The handles of the kernels, one for each of :func:`variants`, or the reason why they cannot be compiled.

    The first call compiles them, which takes seconds, unless they are on disk.
    """
    direction = "backward" if form.backward else "forward"
    return loaded(
        f"{direction} of {form.program.name}",
        lambda: _in_threads(lambda variant: _load_variant(form, variant), variants(form)),
    )


def loaded(kernels: str, load_all: Callable[[], list[int]]) -> tuple[int, ...] | str:
    """The handles of kernels, or why they cannot be compiled.

    Raises:
        RuntimeError: a CUDA graph is captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("an epilogue is compiled at its first call; call it once before the capture")
    start = time.perf_counter()
    try:
        handles = tuple(load_all())
    except CompileError as error:
        return str(error).partition("\n")[0]
    _log.info("%s is ready after %.1f s", kernels, time.perf_counter() - start)
    return handles


def source(form: EpilogueForm, variant: int, vectors: int) -> str:
    """The CUDA source of the kernel of a tile variant; ``vectors``: the number that a lane differentiates at a time."""
    direction = "_backward" if form.backward else ""
    parameters = library().PAIR_ACTIVATION_PARAMS_BYTES if form.second else library().ACTIVATION_PARAMS_BYTES
    definitions = f"""{function_type(form.program, vectors=vectors)}
using T = {ELEMENTS[form.dtype]};
inline constexpr TileVariant kVariant = kTileVariants[{variant}];
using Pair = Operands<Layout::k{form.layout.value}, T, kVariant>;
using Epilogue = {_epilogue(form)};
using Groups = {"TokenGroupsOfPairs" if form.second else "TokenGroups"};
using Kernel = GroupedGemmKernel<Pair::A, {_weights(form)}, T, {boolean(form.scale_bias)}, kVariant, Epilogue, Groups>;
"""
    return gemm_source(f"epilogue_activation{direction}", definitions, parameters)


def gemm_source(header: str, definitions: str, parameters: int) -> str:
    """The CUDA source of a grouped GEMM, from its epilogue's header, its type ``Kernel`` and its parameters' bytes."""
    return f"""#define TENSOR_MAP_ALIGNMENT {library().TENSOR_MAP_ALIGNMENT}
#include "device/epilogue/{header}.cuh"
#include "kernels/gemm/operand_types.cuh"
namespace fusible {{
{definitions}static_assert(sizeof(Kernel::Params) == {parameters}, "the headers of the extension");
}}  // namespace fusible
extern "C" __global__ void __launch_bounds__(fusible::Kernel::kThreads, 1)
    kernel(const __grid_constant__ fusible::Kernel::Params p) {{
  extern __shared__ __align__(1024) uint8_t shared[];
  fusible::Kernel::run(shared, p);
}}
"""


def sources(form: EpilogueForm, variant: int) -> list[str]:
    """The sources of a kernel, in order of preference; the first that does not spill is used.

    Two vectors of gate and up hide each other's latency. A long function only has registers for one.
    """
    by_two = form.backward and len(form.program.arguments) == 2 and not form.narrow
    return [source(form, variant, vectors) for vectors in ((2, 1) if by_two else (1,))]


def compile_ahead(form: EpilogueForm) -> int:
    """Compiles all kernels of a form into the cache on disk; returns how many. Needs no GPU.

    Raises:
        CompileError: see :func:`compiled`.
    """
    _in_threads(lambda variant: len(compiled(sources(form, variant), ARCHITECTURE)), variants(form))
    return len(variants(form))


def load(texts: list[str]) -> int:
    """The handle of the kernel of the first source that does not spill."""
    return LoadedKernel(compiled(texts, ARCHITECTURE)).handle


def variants(form: EpilogueForm) -> list[int]:
    """The tile variants of a form, from which a launch chooses; the one for deep products is last."""
    if form.backward:
        return list(library().BACKWARD_VARIANTS)
    takes_deep = not form.scale_bias and not form.second
    return [*library().ACTIVATION_VARIANTS, *([library().DEEP_ACTIVATION_VARIANT] if takes_deep else [])]


def _load_variant(form: EpilogueForm, variant: int) -> int:
    """The handle of a kernel; 0 if it spills but another tile can replace it."""
    try:
        return load(sources(form, variant))
    except SpillError:
        if variant != library().DEEP_ACTIVATION_VARIANT:
            raise
        return 0


def _epilogue(form: EpilogueForm) -> str:
    operands = form.vectors, form.sums_vectors, form.matrices
    functions = one_function(form.program, form.narrow, form.scales, *operands)
    if form.backward:
        return f"ActivationBackwardEpilogue<{functions}>"
    return f"ActivationEpilogue<{boolean(form.concat)}, {functions}>"


def _weights(form: EpilogueForm) -> str:
    return f"GateUp<Layout::k{form.layout.value}, T, kVariant.tile_n>" if form.concat else "Pair::B"


def _in_threads(load_variant: Callable[[int], int], variants: Iterable[int]) -> list[int]:
    """Compiles in threads, as NVRTC can compile several sources at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(load_variant, variants))
