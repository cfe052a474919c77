"""Quantised tensors as kernels read and write them: rows and columns of tokens, and weights.

Scales decode: a value is its byte times its scale. Under the scales of blocks, rows and groups kernels multiply the
bytes. Other formats are multiplied as their values, in 16 bits.
"""

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
    """Which values share a scale where kernels quantise; products are called by it.

    A block of values; a row of a copy, and a column of a group's tokens; or all values of a group. Under ``VALUES``
    kernels write values in 16 bits that are rounded to a format, and no bytes.
    """

    BLOCKS = "blocks"
    ROWS = "rows"
    GROUPS = "groups"
    VALUES = "values"


class PackedFormat(Enum):
    """How kernels read weights of 8 or 4 bits that are multiplied exactly in 16."""

    MXFP8 = "MXFP8"  # e4m3, and e8m0 for each 32 values
    NVFP4 = "NVFP4"  # e2m1, two to a byte, and e4m3 for each 16 values
    MXFP4 = "MXFP4"  # e2m1, two to a byte, and e8m0 for each 32 values

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is Python code


class Rows(NamedTuple):
    """Rows of tokens, which are contracted over their features.

    Attributes:
        data: [T, K], bytes or packed codes; or the values in bfloat16, without the factors of groups.
        scales: for blocks of 1 x 128, float32 [ceil(K / 128), pitch], with pitch = T rounded up to 4: the scale of
            token t, block b at [b, t]. For whole rows, float32 [T]. Else in the recipe's own layout. None: ``data`` are
            values.
        amax: float32 [E], gives a factor of a product for each group; None: no factors.
    """

    data: Tensor
    scales: Tensor | None = None
    amax: Tensor | None = None


class Columns(NamedTuple):
    """Columns of the tokens of each group, which a weight gradient contracts over the tokens.

    Bytes that kernels read are transposed, in blocks of 128 tokens. There are T // 128 + E blocks. Group g uses
    ceil(size_g / 128) of them, from the sum of those of the groups before it on. Bytes past a group's last token in
    its last block are 0. Blocks that no group uses are unspecified.

    Attributes:
        data: e4m3 [blocks, K, 128]; or the values in bfloat16 [R, K], but for the factors of groups.
        scales: float32 [blocks, K], or as a recipe stores them; None: ``data`` are values.
        amax: as of :class:`Rows`.
        split_sizes: int [E], of values: the rows of each group, with those that fill its last block.
    """

    data: Tensor
    scales: Tensor | None = None
    amax: Tensor | None = None
    split_sizes: Tensor | None = None


class Transposition(Enum):
    """The change of a weight before the gradient of rows, which contracts it over N, reads it."""

    NOTHING = "nothing"  # a product reads it as it is
    VIEW = "view"  # its bytes are transposed already, and their scales become a view; or its values do
    COPY = "copy"  # it is as the recipe stores it, and its bytes are transposed

    __hash__ = object.__hash__


class Weight(NamedTuple):
    """Matrices of E groups. A forward keeps no views for its backward, since a replay cannot keep them.

    Attributes:
        data: [E, N, K], bytes or packed codes, contracted over K; or the values in bfloat16.
        scales: for blocks, float32 [E, blocks of N, blocks of K], with any strides. Blocks restart at each group, and
            at each of two halves of its rows if these are gate and up. For whole rows, float32 [E, N]. Else in the
            recipe's own layout. None: ``data`` are values.
        amax: as of :class:`Rows`.
        packed: the layout of bytes that are multiplied in 16 bits; None: not such bytes.
        turn: the operation of the gradient of rows on it.
    """

    data: Tensor
    scales: Tensor | None = None
    amax: Tensor | None = None
    packed: PackedFormat | None = None
    turn: Transposition = Transposition.NOTHING

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Data, scales and amax."""
        return self[:3]

    @property
    def decoders(self) -> tuple[Tensor, ...]:
        """Scales and amax, those that there are."""
        return tuple([tensor for tensor in self[1:3] if tensor is not None])

    def viewed(self) -> Weight:
        """The transpose, where that takes views alone."""
        if self.turn is Transposition.NOTHING:
            return self
        if self.scales is None:
            return Weight(self.data.mT, None, self.amax)
        return Weight(self.data, self.scales.mT, self.amax)


class WeightOperands(NamedTuple):
    """The operand that a forward makes of a weight [E, N, K], and the one kept for the gradient of rows, if wanted."""

    forward: Weight
    backward: Weight | None
