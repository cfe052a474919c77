"""What a trace is told of the kernels that a call would run, instead of running them."""

from __future__ import annotations

from torch import Tensor

from ...fuser.contract import tracing as trace
from ..programs.program import Program
from ..values.activation_spec import ActivationSpec
from . import unfused
from .dispatch import Choice, activation_choice, pointwise_choice, row_choice
from .hopper import epilogue as hopper_epilogue
from .hopper import gemm as hopper
from .hopper import rows as hopper_rows
from .problems.gemm import (
    ActivateBackward,
    FunctionOperands,
    GroupedGemm,
    Matrices,
    Operands,
    PointwiseRows,
    first,
    nbytes,
)
from .problems.interface import RowKernels
from .pytorch import pointwise as pytorch_pointwise


def product(problem: GroupedGemm, choice: Choice) -> None:
    """A product, and the activation that follows it where that is a kernel of its own."""
    backend, why = choice.backend, choice.epilogue_reason
    if why is None:
        trace.record(_call_of(problem, choice))
        return
    alone = unfused.product_of(problem)
    split = f"its epilogue {why}" if backend is hopper else f"{backend.NAME} {why}"
    reason = "; ".join(filter(None, (choice.reason, split)))
    trace.record(_call_of(alone, choice._replace(reason=reason)))
    epilogue(problem, first(alone.out))


def epilogue(problem: GroupedGemm, rows: Tensor) -> None:
    """An activation that is a kernel of its own, of the rows of its product."""
    activated = problem.epilogue
    if isinstance(activated, ActivateBackward):
        grads, read = activated.grads, problem.of_groups
        activation(activated.spec, activated.preact, activated.scales, rows, *grads[:3], of_groups=read)
    elif activated is not None:
        activation(activated.spec, rows, activated.scales, first(problem.out), of_groups=problem.of_groups)


def _call_of(problem: GroupedGemm, choice: Choice) -> trace.KernelCall:
    """What a trace is told of a product."""
    call = trace.KernelCall(choice.backend.NAME, choice.reason, problem.flops, problem.bytes)
    if choice.backend is not hopper:
        return call
    name = hopper.NAME if problem.epilogue is None else hopper_epilogue.name_of(problem.epilogue.spec)
    return call._replace(kernel=name, configuration=hopper.configuration(problem))


def activation(
    spec: ActivationSpec,
    preact: Tensor,
    scales: Tensor | None,
    *rows: Tensor | None,
    of_groups: FunctionOperands | None = None,
) -> None:
    """An activation, or its backward, with ``rows`` that are read or written beside ``preact``."""
    kernels, reason = activation_choice(spec, preact, scales, *rows[:1], of_groups=of_groups)
    trace.record(trace.KernelCall(kernels.NAME, _shown(reason, preact), 0, nbytes(preact, scales, *rows)))


def pointwise(program: Program, columns: Tensor, rows: PointwiseRows, *moved: Operands) -> None:
    """A pointwise program, or its gradients, over ``columns``; ``moved`` is read or written beside them."""
    kernels, reason = pointwise_choice(program, columns, rows)
    kernel = kernels.NAME if kernels is pytorch_pointwise else f"{kernels.NAME} (pointwise)"
    trace.record(trace.KernelCall(kernel, _shown(reason, columns), 0, nbytes(columns, rows.operands, *moved)))


def column_sums(tokens: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """The sums of the rows of each group."""
    kernels, reason = row_choice(tokens, split_sizes, out)
    _rows("column sums", kernels, _shown(reason, tokens), tokens, scale, out)


def row_dots(tokens: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """The product of each row with the vector of its group."""
    kernels, reason = row_choice(tokens, split_sizes, out)
    _rows("row dots", kernels, _shown(reason, tokens), tokens, vectors, out)


def zero_tail(kernels: RowKernels, reason: str, out: Tensor) -> None:
    """The zeroing of a tail, of which no bytes are counted: with every row in use there is none."""
    _rows("zero tail", kernels, _shown(reason, out))


def _rows(name: str, kernels: RowKernels, reason: str, *moved: Matrices | None) -> None:
    """A pass over rows: by our own kernel of that name, or as part of what another backend is."""
    kernel = f"{hopper.NAME} ({name})" if kernels is hopper_rows else kernels.NAME
    trace.record(trace.KernelCall(kernel, reason, 0, nbytes(*moved)))


def _shown(reason: str, tensor: Tensor) -> str:
    """The reason against our own kernels, which nobody expects on a CPU."""
    return reason if tensor.is_cuda else ""
