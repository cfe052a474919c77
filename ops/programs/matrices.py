"""Matrices among the operands of a program: a number an element."""

from __future__ import annotations

from .program import Program


def equal_gradient(program: Program, operand: str) -> str | None:
    """The name of the gradient that a matrix's is, value for value: ``dy`` or ``dx``; None: it is one of its own.

    That of a matrix that is only added is that of what it is added to.
    """
    outputs, inputs = dict(program.outputs), program.matrix_operands[operand]
    gradients = [outputs[f"d{name}"] for name in inputs]
    if gradients == ["dy"]:
        return "dy"
    is_of_x = len(inputs) == len(program.arguments)
    return "dx" if is_of_x and gradients == [outputs[f"d{name}"] for name in program.arguments] else None
