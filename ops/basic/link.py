"""What a pointwise op computes, as a link of a chain: its program, and what stands for the inputs of that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from torch import Tensor

from ..programs.program import Program, with_constants
from ..programs.tracing import trace
from ..values.activation_spec import ActivationSpec, spec_of_program


class Link(NamedTuple):
    """A program over rows and, in the order of its operands, what an op calls them.

    Attributes:
        rows: keywords of a call, one number a row each.
        columns: parameters, one number a column each.
        matrices: keywords of a call, one number an element of x each.
        constants: their values.
        gated: whether x is gate and up; block: columns of gate before as many of up, None for one block each.
        groups: how many groups have numbers of columns of their own; None if none has.
    """

    program: Program
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    constants: tuple[float, ...] = ()
    gated: bool = False
    block: int | None = None
    groups: int | None = None

    @property
    def spec(self) -> ActivationSpec | None:
        """The link as an activation, with the scale of a row for its number; None where kernels have none such."""
        return None if self.matrices else self.forward_spec

    @property
    def forward_spec(self) -> ActivationSpec | None:
        """As :attr:`spec`, also where it reads matrices, as kernels of the forward can."""
        if len(self.rows) > 1:
            return None
        return spec_of_program(with_constants(self.program, self.constants), self.block)


@cache
def linear_program(function: Callable[[Tensor, Tensor], Tensor], operand: str) -> Program:
    """That of a function of x and one operand: ``r0``, ``a0``, ``m0`` or ``c0``."""
    return trace(function, ("x",), (2.0,)) if operand == "c0" else trace(function, ("x", operand))
