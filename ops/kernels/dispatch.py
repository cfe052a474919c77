"""Which kernel runs, and why none before it: the one place that obeys ``config(backend=..., strict=...)``.

Our own kernels run on a Hopper GPU under ``backend="auto"`` and ``"hopper"``; under any other name everything runs on
PyTorch, the passes over rows and the routing included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...fuser import RefusedError
from ..programs.program import Program
from ..values.activation_spec import ActivationSpec
from ..values.switches import active_switches
from .hopper import fake_quantize as hopper_fake_quantize
from .hopper import gemm as hopper
from .hopper import low_rank as hopper_low_rank
from .hopper import packed_gemm as hopper_packed
from .hopper import pointwise as jit_pointwise
from .hopper import quantize as hopper_quantize
from .hopper import ragged as hopper_ragged
from .hopper import rows as hopper_rows
from .hopper import scaled_activation as hopper_scaled_activation
from .hopper import scaled_gemm as hopper_scaled
from .problems.fake_quantized import FakeQuantizeRows, FakeQuantizing
from .problems.function import FunctionKernels
from .problems.gemm import FunctionOperands, GroupedGemm, PointwiseRows, first
from .problems.interface import (
    ActivationKernels,
    Backend,
    FakeQuantizers,
    PointwiseKernels,
    Quantizers,
    RowKernels,
    ScaledProducts,
)
from .problems.low_rank import LowRankPass
from .problems.quantized import ActivatedScaledGemm, Multiplying, PackedGemm, Quantizing, source
from .problems.ragged import RaggedGemm
from .pytorch import activation as pytorch_activation
from .pytorch import fake_quantize as pytorch_fake_quantize
from .pytorch import float32, grouped_mm, grouped_mm_cpu, loop, ragged_loop
from .pytorch import pointwise as pytorch_pointwise
from .pytorch import quantize as pytorch_quantize
from .pytorch import scaled_gemm as pytorch_scaled
from .triton import gemm as triton
from .triton import row_kernels as triton_rows

P_contra = TypeVar("P_contra", contravariant=True)


class Candidate(Protocol[P_contra]):
    """What can be chosen for problems of a kind."""

    @property
    def NAME(self) -> str: ...

    def refusal(self, problem: P_contra, /) -> str | None:
        """Why the problem cannot be run here; None: it can."""


class RaggedBackend(Candidate[RaggedGemm], Protocol):
    """An implementation of the grouped GEMM of groups of any shapes."""

    def run(self, problem: RaggedGemm, /) -> None:
        """Computes ``problem.out``."""


C = TypeVar("C", bound=Candidate[Any])
K = TypeVar("K")
FEW_ROWS = 16
"""As many of a group, on average, read packed weights as they lie. More than a handful have not been timed."""


class Choice(NamedTuple):
    """A backend, and why none before it; and why the epilogue is a kernel of its own, None where it is none."""

    backend: Backend
    reason: str = ""
    epilogue_reason: str | None = None

    @property
    def zeroes_tail(self) -> bool:
        """Whether rows of a fresh result past the last group are zero."""
        return self.backend in (hopper, grouped_mm_cpu)

    @property
    def finishes_backward(self) -> bool:
        """Whether a backward gives the gradient of the bias, too, and zeroes the tail of that of the scales."""
        return self.epilogue_reason is None and self.backend in (hopper, triton)


_BACKENDS: tuple[Backend, ...] = (hopper, triton, grouped_mm, loop)
_CPU_BACKENDS: tuple[Backend, ...] = (hopper, grouped_mm_cpu, loop)
_RAGGED_BACKENDS: tuple[RaggedBackend, ...] = (hopper_ragged, ragged_loop)
_HOPPER = Choice(hopper)
# on a CPU, with any epilogue; why, only a trace wants to know
_LOOP_ON_CPU = Choice(loop)
_GROUPED_MM_ON_CPU = Choice(grouped_mm_cpu)
_first_takes: set[tuple[Hashable, ...]] = set()  # kinds of problems; as many as there are layers of different sizes


def choose(problem: GroupedGemm, tracing: bool) -> Choice:
    """The first backend that can run the problem, or the one that the configuration asks for.

    Args:
        tracing: the tensors hold no data, and the reason is wanted.

    Raises:
        RefusedError: the backend asked for cannot; or, when strict, the first one cannot on a CUDA device, or it can
            but for the epilogue.
    """
    only = active_switches().backend
    if not tracing and not problem.a.is_cuda and only == "auto":
        return _LOOP_ON_CPU if grouped_mm_cpu.refusal(problem) is not None else _GROUPED_MM_ON_CPU
    choice = _choose_backend(problem, tracing, only)
    if problem.epilogue is None:
        return choice
    why = choice.backend.epilogue_refusal(problem)
    if why is None:
        slower = hopper.slower_epilogue(problem) if choice.backend is hopper else None
        return choice if slower is None else choice._replace(epilogue_reason=slower)
    if choice.backend is hopper and active_switches().strict:
        raise RefusedError(
            f"strict: the activation runs as a kernel of its own, because {hopper.NAME}'s epilogue {why}"
        )
    return choice._replace(epilogue_reason=why)


def second_refusal(problem: GroupedGemm, choice: Choice) -> str | None:
    """Why the product of the second pair of operands is a kernel of its own; None: there is none, or it is not."""
    if problem.second is None:
        return None
    return hopper.second_refusal(problem) if choice.backend is hopper else f"{choice.backend.NAME} takes one pair"


def _choose_backend(problem: GroupedGemm, tracing: bool, only: str) -> Choice:
    if tracing:
        return _ask(problem, only)
    key = problem.cache_key if only in ("auto", hopper.NAME) else None
    if key in _first_takes:
        return _HOPPER
    choice = _ask(problem, only)
    if choice.backend is loop and only == "auto" and problem.a.dtype == torch.float32 and problem.a.is_cuda:
        float32.warn_once()
    if key is not None and choice.backend is hopper:
        _first_takes.add(key)
    return choice


def _ask(problem: GroupedGemm, only: str) -> Choice:
    on_cpu = not problem.a.is_cuda and problem.a.device.type == "cpu"
    backends = _CPU_BACKENDS if on_cpu and only != triton.NAME else _BACKENDS
    return Choice(*_first_that_takes(backends, problem, only, "grouped GEMM", problem.a.is_cuda))


def choose_ragged(problem: RaggedGemm) -> tuple[RaggedBackend, str]:
    """As :func:`choose`, for groups of any shapes; and why none before it."""
    only = active_switches().backend
    return _first_that_takes(_RAGGED_BACKENDS, problem, only, "ragged GEMM", problem.a.data.is_cuda)


def _first_that_takes(backends: Sequence[C], problem: Any, only: str, subject: str, on_cuda: bool) -> tuple[C, str]:
    """The first backend that takes the problem, and why none before it.

    Args:
        only: the name of the one that may, or ``"auto"``.
        subject: names such problems in errors.
        on_cuda: whether a fallback is one, when strict.

    Raises:
        RefusedError: none takes it; or, when strict, not the first.
    """
    refusals: list[str] = []
    for backend in backends:
        if only not in ("auto", backend.NAME):
            continue
        why = backend.refusal(problem)
        if why is None:
            reason = "; ".join(refusals)
            if reason and on_cuda and active_switches().strict:
                raise RefusedError(f"strict: the {subject} falls back to {backend.NAME}, because {reason}")
            return backend, reason
        refusals.append(f"{backend.NAME} {why}")
    raise RefusedError(f"no backend for this {subject}: {'; '.join(refusals) or f'{only} has no kernel for it'}")


def activation_kernels(
    spec: ActivationSpec,
    preact: Tensor,
    scales: Tensor | None,
    *rows: Tensor | None,
    of_groups: FunctionOperands | None = None,
) -> ActivationKernels:
    """For an activation of ``preact``, with ``rows`` that are read or written beside it."""
    return activation_choice(spec, preact, scales, *rows, of_groups=of_groups)[0]


def activation_choice(
    spec: ActivationSpec,
    preact: Tensor,
    scales: Tensor | None,
    *rows: Tensor | None,
    of_groups: FunctionOperands | None = None,
) -> tuple[ActivationKernels, str]:
    """:func:`activation_kernels`, and why not our own."""
    if spec.program is not None:
        read = PointwiseRows(preact, spec.block, None if scales is None else (scales,))
        read = read if of_groups is None else read._replace(**of_groups._asdict())
        kernels, why = pointwise_choice(spec.program, preact, read)
        return FunctionKernels(kernels, spec.program, of_groups), why
    refusal = partial(hopper_rows.activation_refusal, preact, scales, *rows)
    return _ours_or(pytorch_activation, hopper_rows, refusal, "activation", preact)


def pointwise_choice(program: Program, columns: Tensor, rows: PointwiseRows) -> tuple[PointwiseKernels, str]:
    """For a pointwise program over such columns, with what else it reads; and why not our own."""
    refusal = partial(jit_pointwise.refusal, program, columns, rows)
    return _ours_or(pytorch_pointwise, jit_pointwise, refusal, "pointwise function", columns)


def row_kernels(tokens: Tensor, split_sizes: Tensor, out: Tensor) -> RowKernels:
    """For passes over rows [T, N] that know groups."""
    return row_choice(tokens, split_sizes, out)[0]


def row_choice(tokens: Tensor, split_sizes: Tensor, out: Tensor) -> tuple[RowKernels, str]:
    """:func:`row_kernels`, and why not our own."""
    # what keeps split sizes on the device on CUDA, and makes no indices on a CPU
    fallback: RowKernels = grouped_mm if tokens.is_cuda else loop
    only = active_switches().backend
    if only in ("auto", triton.NAME) and (tokens.is_cuda or only == triton.NAME):
        fallback = triton_rows if triton_rows.refusal(tokens, split_sizes, out) is None else fallback
    if fallback is triton_rows and only == triton.NAME:
        return fallback, ""
    refusal = partial(hopper_rows.groups_refusal, tokens, split_sizes, out)
    return _ours_or(fallback, hopper_rows, refusal, "pass over rows", tokens)


def quantizers(problem: Quantizing) -> tuple[Quantizers, str]:
    """What makes the copies, and why not our own kernels."""
    refusal = partial(hopper_quantize.refusal, problem)
    return _ours_or(pytorch_quantize, hopper_quantize, refusal, "quantiser", source(problem))


def fake_quantizers(problem: FakeQuantizing) -> tuple[FakeQuantizers, str]:
    """What rounds to the values of copies, and why not our own kernels."""
    read = problem.x if isinstance(problem, FakeQuantizeRows) else first(problem.weight)
    refusal = partial(hopper_fake_quantize.refusal, problem)
    return _ours_or(pytorch_fake_quantize, hopper_fake_quantize, refusal, "quantiser", read)


def scaled_products(problem: Multiplying) -> tuple[ScaledProducts, str]:
    """What multiplies quantised operands, and why not our own kernels."""
    refusal = partial(hopper_scaled.refusal, problem)
    return _ours_or(pytorch_scaled, hopper_scaled, refusal, "product of quantised operands", problem.a.data)


def packed_refusal(problem: PackedGemm) -> str | None:
    """Why our own kernel does not read packed weights as they lie; None: it does. Nothing is lost without it."""
    backend = active_switches().backend
    if backend not in ("auto", hopper.NAME):
        return f"config(backend={backend!r})"
    if problem.rows > FEW_ROWS * problem.groups:
        return f"{problem.rows} rows of {problem.groups} groups are not few: more than {FEW_ROWS} of each, on average"
    return hopper_packed.refusal(problem)


def scaled_epilogue_refusal(problem: ActivatedScaledGemm) -> str | None:
    """Why the activation behind a product of quantised operands is a kernel of its own; None: it is the epilogue."""
    backend, why = scaled_products(problem.product)
    return hopper_scaled_activation.refusal(problem) if backend is hopper_scaled else why


def low_rank_refusal(problem: LowRankPass) -> str | None:
    """Why our own kernel does not make a pass of low rank; None: it does. Products in its place are no fallback."""
    only = active_switches().backend
    if only not in ("auto", hopper.NAME):
        return f"config(backend={only!r})"
    if not problem.x.is_cuda and only == "auto":
        return f"{hopper.NAME} needs a CUDA device, got {problem.x.device.type}"
    return hopper_low_rank.refusal(problem)


def native_refusal(refusal: Callable[[], str | None], subject: str, read: Tensor) -> str | None:
    """Why a kernel of ours that an op declares for itself does not run; None: it does.

    Args:
        refusal: why the kernel does not take the arguments, in words that follow "it"; None: it takes them.
        subject: what errors call it.
        read: a tensor that it reads.

    Raises:
        RefusedError: our own are asked for by name, or strictly on a CUDA device, and cannot.
    """
    ours, why = _ours_or(False, True, refusal, subject, read)
    return None if ours else why


def _ours_or(fallback: K, ours: K, refusal: Callable[[], str | None], subject: str, read: Tensor) -> tuple[K, str]:
    """Our own kernels where they are allowed and take the tensors, else the fallback and why; ``read`` is a tensor.

    Raises:
        RefusedError: our own are asked for by name, or strictly on a CUDA device, and cannot.
    """
    config = active_switches()
    if config.backend not in ("auto", hopper.NAME):
        return fallback, f"config(backend={config.backend!r})"
    if not read.is_cuda and config.backend == "auto":
        return fallback, f"{hopper.NAME} needs a CUDA device, got {read.device.type}"
    why = refusal()
    if why is None:
        return ours, ""
    if config.backend == hopper.NAME or config.strict:
        raise RefusedError(f"the {subject} has no kernel of {hopper.NAME}, because it {why}")
    return fallback, f"{hopper.NAME} {why}"
