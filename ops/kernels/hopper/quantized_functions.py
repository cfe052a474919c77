"""The kernels of users' functions that quantise their results, and the column operands of a problem."""

from __future__ import annotations

from typing import Any

from ..architecture import assumed
from ..jit import quantized
from ..jit.operands import is_concat, is_narrow
from ..problems.quantized import ActivatedScaledGemm, QuantizeActivation, QuantizeActivationBackward
from .column_operands import ColumnGradients, ColumnOperands
from .rows import activation

FunctionProblem = ActivatedScaledGemm | QuantizeActivation | QuantizeActivationBackward


def refusal(problem: FunctionProblem) -> str | None:
    """The reason why a user's function has no kernel, or None. It is compiled here, unless the GPU is only assumed.

    The problem keeps the kernel for its launch.
    """
    operands = _operands(problem)
    if operands is None or (why := operands.refusal()) is not None:
        return None if operands is None else why
    if operands.program.matrices:
        return "reads no matrix"
    if assumed() is not None:
        return None
    form = _form(problem, operands)
    kernel = quantized.handle(form)
    problem.kernel = kernel if isinstance(kernel, int) else 0
    return quantized.refusal(form)


def fields(problem: FunctionProblem) -> dict[str, Any]:
    """The activation as the extension wants it, with the kernel of a user's function and what that reads of columns."""
    of_launch = activation(problem.activation, _features(problem))
    if (operands := _operands(problem)) is None:
        return {"activation": of_launch}
    kernel = problem.kernel or quantized.handle(_form(problem, operands))
    assert isinstance(kernel, int), kernel
    return {"activation": of_launch._replace(kernel=kernel), "vectors": operands.addresses}


def gradients(problem: QuantizeActivationBackward) -> ColumnGradients | None:
    """The destination of the gradients of column numbers; None if they are not wanted or not present."""
    program = problem.activation.program
    if program is None or not program.columns or problem.dvectors is None:
        return None
    return ColumnGradients.of(program, problem.dvectors, _features(problem))


def gradient_fields(problem: QuantizeActivationBackward, dvectors: ColumnGradients | None) -> dict[str, list[int]]:
    """These as the extension wants them."""
    program = problem.activation.program
    if dvectors is None or program is None:
        return {}
    return dvectors.fields(program, problem.activation.block or _features(problem))


def _operands(problem: FunctionProblem) -> ColumnOperands | None:
    return ColumnOperands.of(problem.activation, problem.vectors, _features(problem))


def _features(problem: FunctionProblem) -> int:
    """The features of the activation."""
    if isinstance(problem, ActivatedScaledGemm):
        return problem.rows.data.shape[1]
    return problem.activation.out_features(problem.preact.shape[1])


def _form(problem: FunctionProblem, operands: ColumnOperands) -> quantized.QuantizingForm:
    lies = operands.program, problem.activation.block, _features(problem)
    narrow, scales = is_narrow(*lies), problem.scales is not None
    if isinstance(problem, ActivatedScaledGemm):
        product, concat = problem.product, is_concat(*lies)
        biased = product.bias is not None or product.bias_scale is not None
        of_product = operands.program, product.out.dtype, concat, narrow, biased
        return quantized.ScaledForm(*of_product, operands.types, scales)
    backward = isinstance(problem, QuantizeActivationBackward)
    sums = isinstance(problem, QuantizeActivationBackward) and gradients(problem) is not None
    of_rows = operands.program, backward, problem.preact.dtype, narrow
    return quantized.QuantizerForm(*of_rows, operands.types, sums, scales)
