"""MXFP8: e4m3 with a power of two for each 32 values along the contraction, as Blackwell's tensor cores read it.

The scale is ``amax`` times the float nearest to 1 / 448, rounded up to a power of two. Values are multiplied by its
inverse, and rounded to the nearest. Bytes and scales are those of TransformerEngine. Both copies of a tensor are
quantised from its values, so they differ in more than their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .copies import BLOCK, Columns, PackedFormat, Rows, Scaling, Transposition, Weight
from .decoding import Codes, Decoding
from .formats import E4M3, cast, cast_e8m0, from_e8m0
from .packed import unpacks
from .recipe import Recipe, check_choice, register, transposed_bytes
from .reference import amax_of, gather, scatter, split, token_blocks

MX_BLOCK = 32
_PER_BLOCK = BLOCK // MX_BLOCK
_OF_INFINITY, _OF_NAN = 0xFE, 0xFF  # the bytes of scales; that of the largest finite amax is 0xF7
Compute = Literal["exact", "fast"]


@register
@dataclass(frozen=True)
class MXFP8(Recipe):
    """e4m3 with a power of two for each 32 values along the contraction, as Blackwell multiplies it.

    Attributes:
        compute: ``"exact"``: values are dequantised to bfloat16 without loss and multiplied there; ``"fast"``: they are
            regrouped to blocks of 128 and multiplied as under :class:`Float8Block`.

    Raises:
        ValueError: another value.
    """

    compute: Compute = "exact"

    def __post_init__(self) -> None:
        check_choice(self, "compute", get_args(Compute))

    @property
    def is_exact(self) -> bool:
        """Whether products are those of the dequantised values, in 16 bits."""
        return self.compute == "exact"

    @property
    def packed(self) -> PackedFormat | None:
        return PackedFormat.MXFP8 if self.is_exact else None

    @property
    def has_one_copy(self) -> bool:
        return not self.is_exact

    @property
    def has_square_blocks(self) -> bool:
        return not self.is_exact

    def kernels(self, is_gradient: bool) -> Scaling | None:
        return Scaling.VALUES if self.is_exact else None

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        return quantize_rows(x)

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        return quantize_columns(x, split_sizes)

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return Weight(*quantize_rows(weight))

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        """Bytes and scales have the layout of the weight's."""
        turned = _turned(self.weight(weight.mT))
        return turned._replace(data=turned.data.contiguous())

    def row_values(self, rows: Rows, split_sizes: Tensor) -> Tensor:
        return dequantize_rows(rows, torch.float32)

    def column_values(self, columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
        return dequantize_columns(columns, split_sizes, torch.float32)

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return dequantize_rows(weight, torch.float32)

    def transposed_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return dequantize_rows(_turned(weight), torch.float32).mT

    def row_operand(self, rows: Rows, split_sizes: Tensor) -> Rows:
        return super().row_operand(rows, split_sizes) if self.is_exact else regroup_rows(rows)

    def column_operand(self, columns: Columns, split_sizes: Tensor, rows: int) -> Columns:
        return (
            super().column_operand(columns, split_sizes, rows)
            if self.is_exact
            else regroup_columns(columns, split_sizes)
        )

    def weight_operand(self, weight: Weight, parts: int = 1) -> Weight:
        return super().weight_operand(weight, parts) if self.is_exact else regroup_weight(weight, parts)

    def turned(
        self, weight: Weight, parts: int = 1, transpose: Callable[[Tensor], Tensor] = transposed_bytes
    ) -> Weight:
        if self.is_exact:
            return super().turned(weight, parts, transpose)
        operand = self.weight_operand(weight, parts)
        return Weight(transpose(operand.data), operand.scales, turn=Transposition.VIEW).viewed()


def quantize_rows(x: Tensor) -> Rows:
    """``x`` [..., K] of any float type: e4m3 [..., K], with scales in e8m0 [..., ceil(K / 32)]."""
    data, scales = _quantize(split(x, -1, MX_BLOCK), -1)
    return Rows(data.flatten(-2)[..., : x.shape[-1]].contiguous(), scales.squeeze(-1))


def quantize_columns(x: Tensor, split_sizes: Tensor) -> Columns:
    """``x`` [T, K] of any float type, in blocks of 32 tokens of one group; the bytes lie as the tokens do.

    e4m3 [T, K], 0 in the tail, with scales in e8m0 [T // 32 + E, K]. Group g uses ceil(size_g / 32) rows of them, from
    the sum of those of the groups before it on.
    """
    blocks = token_blocks(split_sizes, x.shape[0], MX_BLOCK)
    data, scales = _quantize(gather(x, blocks), 1)
    bytes = scatter(data.view(torch.uint8), blocks, x.shape[0])
    return Columns(bytes.view(E4M3.dtype), scales.squeeze(1))


def _quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Blocks that are all of a dimension, which stays in the scales with a size of 1."""
    scales = cast_e8m0(amax_of(x, (dim,)) * (1 / E4M3.max))
    return cast(x.float() * _inverse(scales), E4M3), scales


def _turned(weight: Weight) -> Weight:
    """The transposes, their scales copied."""
    assert weight.scales is not None
    return Weight(weight.data.mT, transposed_bytes(weight.scales))


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, float32, exactly; NaN of NaN."""
    return torch.ones((), dtype=torch.float32, device=scales.device) / from_e8m0(scales)


@unpacks(PackedFormat.MXFP8, Decoding(Codes.E4M3, MX_BLOCK))
def unpacked(data: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., K], of the bytes of a weight that stays as it is."""
    return dequantize_rows(Rows(data, scales))


def dequantize_rows(rows: Rows | Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., K]; exact in bfloat16 for scales above 2 ** -125 and below 2 ** 120."""
    assert rows.scales is not None
    scales = from_e8m0(rows.scales).repeat_interleave(MX_BLOCK, -1)[..., : rows.data.shape[-1]]
    return (rows.data.float() * scales).to(dtype)


def dequantize_columns(columns: Columns, split_sizes: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[T, K], zero in the tail; exact as that of rows is."""
    assert columns.scales is not None
    rows = columns.data.shape[0]
    blocks = token_blocks(split_sizes, rows, MX_BLOCK)
    values = gather(columns.data.view(torch.uint8), blocks).view(E4M3.dtype).float()
    return scatter((values * from_e8m0(columns.scales).unsqueeze(1)).to(dtype), blocks, rows)


def regroup_rows(rows: Rows) -> Rows:
    """Rows [T, K] in the form of :class:`~fusible.Float8Block`: exact except for values that become subnormal."""
    assert rows.scales is not None
    tokens = rows.data.shape[0]
    exponents = split(rows.scales.view(torch.uint8), -1, _PER_BLOCK)
    largest = exponents.amax(-1, keepdim=True)
    data = _shifted(rows.data, _shift(exponents, largest).flatten(1))
    scales = _block_scales(largest.squeeze(-1)).t()
    return Rows(data, torch.nn.functional.pad(scales, (0, -tokens % 4)).contiguous())


def regroup_columns(columns: Columns, split_sizes: Tensor) -> Columns:
    """Columns as those of :class:`~fusible.Float8Block`, exact as :func:`regroup_rows` is."""
    assert columns.scales is not None
    rows = columns.data.shape[0]
    blocks, small = token_blocks(split_sizes, rows), token_blocks(split_sizes, rows, MX_BLOCK)
    exponents = scatter(columns.scales.view(torch.uint8).unsqueeze(1).expand(-1, MX_BLOCK, -1), small, rows)
    exponents = gather(exponents, blocks)  # [blocks, 128, K], of each token
    largest = exponents.amax(1, keepdim=True)
    values = gather(columns.data.view(torch.uint8), blocks).view(E4M3.dtype).float() * _shift(exponents, largest)
    return Columns(cast(values, E4M3).transpose(1, 2).contiguous(), _block_scales(largest.squeeze(1)))


def regroup_weight(weight: Weight, halves: int) -> Weight:
    """Matrices [E, N, K] as those of :class:`~fusible.Float8Block`, exact as :func:`regroup_rows` is."""
    assert weight.scales is not None
    experts, rows = weight.data.shape[:2]
    exponents = weight.scales.view(torch.uint8).reshape(experts, halves, rows // halves, -1)
    blocks = split(split(exponents, -1, _PER_BLOCK), 2, BLOCK)  # [E, halves, blocks, 128, blocks, 4]
    largest = blocks.amax((3, 5), keepdim=True)
    factors = _shift(blocks, largest).flatten(4).flatten(2, 3)[:, :, : rows // halves].flatten(1, 2)
    data = _shifted(weight.data, factors)
    scales = _block_scales(largest.squeeze(5).squeeze(3)).flatten(1, 2)
    return Weight(data, scales)


def _block_scales(largest: Tensor) -> Tensor:
    """The scales of blocks as float32: NaN for MX blocks with the scale of infinity, whose bytes are those of 448.

    A product of bytes would take them for 448 times 2 ** 127, and give a finite number where weights are small.
    """
    return from_e8m0(torch.where(largest == _OF_INFINITY, _OF_NAN, largest))


def _shift(exponents: Tensor, largest: Tensor) -> Tensor:
    """The float32 factors of bytes when their scale becomes the largest scale; 0 for bytes that would underflow."""
    exponent = (127 + exponents.int() - largest.int()).clamp(min=0)
    return (exponent << 23).view(torch.float32)


def _shifted(data: Tensor, factors: Tensor) -> Tensor:
    """Bytes [..., K] times a factor of each 32."""
    by_value = factors.repeat_interleave(MX_BLOCK, -1)[..., : data.shape[-1]]
    return cast(data.float() * by_value, E4M3)
