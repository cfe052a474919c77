"""The compile-time form of a kernel: values that kernels read as constants."""

from __future__ import annotations

from typing import NamedTuple


class ProgramTile(NamedTuple):
    """How a kernel is compiled and launched.

    Attributes:
        m, n, k: the tile of the result, and the depth of a step.
        warps, stages: of a program.
        strip: row tiles that are swept across the columns together.
        per_sm: programs a multiprocessor, which take tile after tile; 0: a program per tile.
        tma: operands come by bulk copies, where they are aligned.
        flatten: the loop over tiles and that over the depth are one, so that loads go on during an epilogue.
        part: columns of gate, or of up, that an epilogue computes at a time: registers do not suffice for the whole.
        registers: at most so many a thread.
        apart: the backward of an activation is a kernel of its own, after the product; but for sums of columns.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    strip: int = 8
    per_sm: int = 0
    tma: bool = False
    flatten: bool = False
    part: int = 32
    registers: int | None = None
    apart: bool = False

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


class RowsShape(NamedTuple):
    """A product of rows that are grouped.

    Attributes:
        n, k: its columns and depth.
        block: the number of columns of gate before as many of up, in the epilogue's operands; 0 without gate and up.
        gated: whether the columns of the product are also gate and up.
        transposed: b is [E, K, N], not [E, N, K].
        pairs: gate and up alternate in a tile; else its first half is gate.
        unit_a, unit_b: elements of which all pitches are multiples.
        precision: how float32 is multiplied.
        tma: a and b are descriptors.
        columns, elements: how many numbers of columns and of elements the epilogue reads.
        listed: b is a table of the addresses of matrices, which are multiples of so many bytes; 0: it is a matrix.
    """

    n: int
    k: int
    block: int
    gated: bool
    transposed: bool
    pairs: bool
    unit_a: int
    unit_b: int
    precision: str
    tma: bool
    listed: int
    columns: int
    elements: int


class WeightShape(NamedTuple):
    """A product whose depth is grouped, [M, N] for each group; otherwise as :class:`RowsShape`.

    Attributes:
        listed: as for :class:`RowsShape`, for the result.
    """

    m: int
    n: int
    unit_a: int
    unit_b: int
    unit_out: int
    precision: str
    tma: bool
    listed: int
