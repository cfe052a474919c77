"""The column and element operands of a user's function for kernels, and the destination of columns' gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...programs.columns import tensors_of
from ...programs.program import Program
from ...values.activation_spec import ActivationSpec
from ..extension import TYPE_CODES
from ..jit.operands import inputs_of
from ..jit.pointwise_driver import MOST_OPERANDS
from ..problems.gemm import Operands, addresses


class ColumnOperands(NamedTuple):
    """The numbers of columns of one call, and then the matrices.

    Attributes:
        tensors: of each operand of the program; none where it reads none.
    """

    program: Program
    tensors: list[Tensor | None]
    block: int

    @classmethod
    def of(
        cls, spec: ActivationSpec, vectors: Operands, columns: int, matrices: Operands = None
    ) -> ColumnOperands | None:
        """The operands, or None if the activation is not a user's function. ``columns``: those of the activation."""
        program = spec.program
        if program is None:
            return None
        of_columns = tensors_of(program.column_operands, vectors, columns)
        of_elements = tensors_of(program.matrix_operands, matrices, columns)
        return cls(program, of_columns + of_elements, spec.block or columns)

    def refusal(self) -> str | None:
        """Why kernels do not read them, in pieces of 16 bytes; None: they do."""
        if (count := len(self.program.columns + self.program.matrices)) > MOST_OPERANDS:
            return f"takes at most {MOST_OPERANDS} numbers of a column or an element, got {count}"
        for tensor in self.tensors:
            if tensor is None or tensor.dtype not in TYPE_CODES:
                return "needs numbers of columns and matrices of 16 or 32 bits"
            if not tensor.is_contiguous() or addresses(tensor)[0] % 16:
                return "needs numbers of columns and matrices that are dense and aligned to 16 bytes"
        return None

    @property
    def types(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the inputs of the program."""
        of_operands = zip(self.program.tensor_operands.values(), self.tensors, strict=False)
        return tuple([tensor.dtype for names, tensor in of_operands if tensor is not None for _ in names])

    @property
    def addresses(self) -> list[int]:
        """The addresses of the inputs of the program."""
        return [each.address for each in inputs_of(self.program.tensor_operands, self.tensors, self.block)]


class ColumnGradients(NamedTuple):
    """The destination of gradients of column numbers: ``out``, or dense tensors that are copied to it."""

    out: list[Tensor | None]
    dense: list[Tensor | None]

    @classmethod
    def of(cls, program: Program, out: Operands, columns: int) -> ColumnGradients:
        gradients = tensors_of(program.column_operands, out, columns)
        return cls(gradients, [None if each is None else each.contiguous() for each in gradients])

    def fields(self, program: Program, block: int) -> dict[str, list[int]]:
        """The fields of the launch."""
        inputs = inputs_of(program.column_operands, self.dense, block)
        return {
            "dvectors": [each.address for each in inputs],
            "dvector_types": [TYPE_CODES[each.tensor.dtype] if each.tensor is not None else 0 for each in inputs],
            "dvectors_of_both": [int(name[-1] in "gu") for name in program.columns],
            "dvectors_of_all_rows": [int(name[0] == "a") for name in program.columns],
        }

    def finish(self) -> None:
        """Copies dense gradients to outputs that are not dense."""
        for gradient, dense in zip(self.out, self.dense, strict=True):
            if gradient is not None and dense is not None and dense is not gradient:
                gradient.copy_(dense)
