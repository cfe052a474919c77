"""The quantised copies of a tensor that kernels read and write. Scales decode: value = byte * scale."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor

BLOCK = 128
SCALES = "weight_scale_inv"
"""The buffer of the decode scales of a weight that stays quantised; checkpoints call it so."""
AMAX = "weight_amax"
"""The buffer [E] from which the scales of groups come, of a weight that stays quantised by ``NVFP4``."""


def ceil_blocks(size: int) -> int:
    """Blocks of which the last may be smaller."""
    return -(-size // BLOCK)


class Scaling(Enum):
    """What has one scale: a block of values; a row of a copy, and a column of a group's tokens; or all of a group."""

    BLOCKS = "blocks"
    ROWS = "rows"
    GROUPS = "groups"


class QuantizedRows(NamedTuple):
    """Rows of tokens, scaled in blocks of 1 x 128, or whole.

    Attributes:
        data: e4m3 [T, K].
        scales: float32 [ceil(K / 128), pitch], with pitch = T rounded up to 4: the scale of token t, block b at [b, t].
            Or [T], one for each whole row.
    """

    data: Tensor
    scales: Tensor


class BlockedColumns(NamedTuple):
    """Tokens of each group in blocks of 128, transposed: what a weight gradient contracts.

    There are T // 128 + E blocks. Group g uses ceil(size_g / 128) of them, from the sum of those of the groups before
    it on. Bytes past a group's last token in its last block are 0. Blocks that no group uses are unspecified.

    Attributes:
        data: e4m3 [blocks, K, 128].
        scales: float32 [blocks, K].
    """

    data: Tensor
    scales: Tensor


class QuantizedWeight(NamedTuple):
    """Weights of E experts, scaled in blocks of 128 x 128.

    Blocks restart at each expert, and at each of ``halves`` of its rows: 2 where they are gate and up, else 1.

    Attributes:
        data: e4m3 [E, N, K].
        transposed: e4m3 [E, K, N], the same bytes; None: nobody wants them.
        scales: float32 [E, halves * ceil(N / halves / 128), ceil(K / 128)].
    """

    data: Tensor
    transposed: Tensor | None
    scales: Tensor


class RowWeight(NamedTuple):
    """Weights of E experts with a scale for each row of either copy.

    Attributes:
        data: e4m3 [E, N, K]; scales: float32 [E, N].
        transposed: e4m3 [E, K, N]; transposed_scales: float32 [E, K]. Both None: nobody wants them.
    """

    data: Tensor
    scales: Tensor
    transposed: Tensor | None
    transposed_scales: Tensor | None


class WeightOperand(NamedTuple):
    """A weight as one product of rows reads it: ``W`` for the forward, its transpose for the gradient of rows.

    Attributes:
        data: [E, M, K], contracted over K: bytes of 8 bits, or the values in bfloat16.
        scales: of bytes, float32 [E, blocks of M, blocks of K], with any strides; or [E, M], one for each whole row,
            where rows of tokens have one too; None: ``data`` are values.
        amax: float32 [E], from which the product has a factor of each group, under NVFP4.
    """

    data: Tensor
    scales: Tensor | None = None
    amax: Tensor | None = None


class TransposedWeight(NamedTuple):
    """The bytes of a weight for the gradient of rows, as a forward keeps them: no views, which a replay cannot keep.

    Attributes:
        data: e4m3 [E, K, N].
        scales: those of the weight itself, float32 [E, blocks of N, blocks of K].
    """

    data: Tensor
    scales: Tensor

    @property
    def operand(self) -> WeightOperand:
        return WeightOperand(self.data, self.scales.mT)


class TransposedValues(NamedTuple):
    """The values of a weight for the gradient of rows, as a forward keeps them: as :class:`TransposedWeight`.

    Attributes:
        data: bfloat16 [E, N, K], as the weight lies.
        amax: as of :class:`WeightOperand`.
    """

    data: Tensor
    amax: Tensor | None = None

    @property
    def operand(self) -> WeightOperand:
        return WeightOperand(self.data.mT, amax=self.amax)


BackwardWeight = WeightOperand | TransposedWeight | TransposedValues
"""A weight for the gradient of rows, as a forward keeps it."""


class RowValues(NamedTuple):
    """Rows of tokens whose copies are multiplied exactly in 16 bits.

    Attributes:
        data: bfloat16 [T, K], but for the factors of groups.
        amax: as of :class:`WeightOperand`.
    """

    data: Tensor
    amax: Tensor | None = None


class ColumnValues(NamedTuple):
    """Tokens of each group, for a weight gradient that is computed exactly in 16 bits.

    Attributes:
        data: bfloat16 [R, K], but for the factors of groups.
        split_sizes: int [E], the rows of each group, with those that fill its last block.
        amax: as of :class:`WeightOperand`.
    """

    data: Tensor
    split_sizes: Tensor
    amax: Tensor | None = None


Rows = QuantizedRows | RowValues
"""What a product of rows reads of tokens."""
Columns = BlockedColumns | ColumnValues
"""What a weight gradient reads of tokens."""
