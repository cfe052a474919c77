"""A pointwise op as a link of a chain: its program, and the op's names of the program's inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from torch import Tensor

from ..programs.program import Program, with_constants
from ..programs.tracing import trace
from ..values.activation_spec import ActivationSpec, spec_of_program


class Link(NamedTuple):
    """A program over rows, with the op's names of its operands, in order.

    Attributes:
        rows: keywords of a call, each with one number per row.
        columns: parameters, each with one number per column.
        matrices: keywords of a call, each with one number per element of x.
        constants: the values of the constants.
        gated: whether x is gate and up; block: the block size in which they alternate, None for one block each.
        groups: the number of groups with their own numbers of columns; None without groups.
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
        """The link as an activation that reads its number of a row as the row's scale; None if kernels have none."""
        return None if self.matrices else self.forward_spec

    @property
    def forward_spec(self) -> ActivationSpec | None:
        """Like :attr:`spec`, but also with matrices, which kernels of the forward can read."""
        if len(self.rows) > 1:
            return None
        return spec_of_program(with_constants(self.program, self.constants), self.block)


@cache
def linear_program(function: Callable[[Tensor, Tensor], Tensor], operand: str) -> Program:
    """The program of a function of x and one operand: ``r0``, ``a0``, ``m0`` or ``c0``."""
    return trace(function, ("x",), (2.0,)) if operand == "c0" else trace(function, ("x", operand))
