"""The problems of fake quantisers: rounding to the values, in bfloat16, of the operands under a recipe, in one pass.

Values under NVFP4 lack the factor of each group, which follows from its amax. Outputs are allocated by the door.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...formats.copies import PackedFormat
from .gemm import Matrices, SourceRows, first, nbytes


@dataclass(slots=True)
class FakeQuantizeRows(SourceRows):
    """The values of the copies of rows of tokens, sorted by group.

    Attributes:
        x: [T, K], with dense columns.
        split_sizes: int32 or int64 [E], on the device of ``x``. Rows past the last group may become anything.
        rows: bfloat16 [T, K], in blocks along K; None: not wanted.
        columns: in blocks of a group's tokens: bfloat16 [T, K]; under NVFP4 [16 * (T // 16 + E), K], where the last
        block of a group is padded. None: not wanted.
        row_amax, column_amax: float32 [E] under NVFP4: the output for the amaxes.
        is_transformed: columns are multiplied by :func:`~fusible.ops.formats.nvfp4.hadamard` first, under NVFP4.
        seed: int64 [1], the seed of stochastic rounding under NVFP4; None: round to nearest.
        slot_of_row, top_k: as of :class:`~.quantized.QuantizeRows`.
    """

    x: Tensor
    split_sizes: Tensor
    format: PackedFormat
    rows: Tensor | None
    columns: Tensor | None
    row_amax: Tensor | None = None
    column_amax: Tensor | None = None
    is_transformed: bool = False
    seed: Tensor | None = None
    slot_of_row: Tensor | None = None
    top_k: int = 1

    @property
    def bytes(self) -> int:
        """NVFP4 reads twice: for the largest magnitudes of groups, and to round."""
        read = nbytes(self.x) * (2 if self.format is PackedFormat.NVFP4 else 1)
        return read + nbytes(self.slot_of_row, self.rows, self.columns)

    def __str__(self) -> str:
        names = [name for name, copy in (("rows", self.rows), ("columns", self.columns)) if copy is not None]
        return f"rows {'+'.join(names)} to values of {self.format.value}"


@dataclass(slots=True)
class FakeQuantizeWeight:
    """The rounded values of the matrices of all groups, in the layout of the weight.

    Attributes:
        weight: [E, N, K], or E matrices [N, K], with any strides.
        rows: bfloat16 [E, N, K], in blocks along K; under NVFP4 of 16 x 16. None: not wanted.
        columns: bfloat16 [E, N, K], in blocks along N; None: not wanted, or NVFP4, which has a single one.
        amax: float32 [E] under NVFP4: its output.
    """

    weight: Matrices
    format: PackedFormat
    rows: Tensor | None
    columns: Tensor | None
    amax: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """One that it reads, to ask for dtype and device."""
        return first(self.weight)

    @property
    def bytes(self) -> int:
        """As of :class:`FakeQuantizeRows`."""
        read = nbytes(self.weight) * (2 if self.format is PackedFormat.NVFP4 else 1)
        return read + nbytes(self.rows, self.columns)

    def __str__(self) -> str:
        both = self.rows is not None and self.columns is not None
        return f"weight {'both' if both else 'one copy'} to values of {self.format.value}"


FakeQuantizing = FakeQuantizeRows | FakeQuantizeWeight
"""The problems of ``fake_quantize.py`` of a backend."""
