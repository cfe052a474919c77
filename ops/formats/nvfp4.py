"""NVFP4: e2m1 with an e4m3 scale for each 16 values, or 16 x 16 of a weight, and a float32 scale for each group.

Bytes and scales are those of TransformerEngine, whose order of multiplications is part of the format. With the largest
magnitudes ``amax`` of a group and ``block_amax`` of a block::

    encode_group = min(6 * 448 / amax, largest float), or 1 if amax is 0 or infinite
    scale        = e4m3(block_amax * (encode_group * (1 / 6)))
    encode       = min(1 / (scale * (1 / encode_group)), largest float)
    code         = nearest(value * encode)        ties to the even code, saturating at 6

A product of codes is right but for a factor of each group: see :func:`~.formats.product_factors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...fuser.replay import capture
from .copies import Columns, PackedFormat, Rows, Scaling, Weight
from .decoding import Codes, Decoding
from .formats import E2M1_MAX, E4M3, cast, cast_e2m1, cast_e2m1_stochastic, from_e2m1, pack, unpack
from .packed import unpacks
from .random import new_seed, uniform_of_rows
from .recipe import Recipe, check_choice, check_flag, register
from .reference import amax_of, gather, groups_of, largest_by_group, scatter, split, token_blocks

NV_BLOCK = 16
_NEGATIVE = 0b1101_0111_1110_1000  # which rows of the transform change their sign; TransformerEngine's choice


@register
@dataclass(frozen=True)
class NVFP4(Recipe):
    """e2m1 with an e4m3 scale for each 16 values and a float32 scale for each group; computed exactly, in bfloat16.

    Operands do not include the scale of the group, which products apply as a factor.

    Attributes:
        stochastic_rounding: whether gradients are rounded stochastically.
        hadamard: whether rows are transformed before they are quantised for a weight gradient.

    Raises:
        ValueError: another value.
    """

    scaling: ClassVar[Scaling] = Scaling.VALUES
    packed: ClassVar[PackedFormat] = PackedFormat.NVFP4
    values_in_byte: ClassVar[int] = 2
    has_square_blocks: ClassVar[bool] = True
    stochastic_rounding: bool = True
    hadamard: bool = True
    compute: Literal["exact"] = "exact"

    def __post_init__(self) -> None:
        check_flag(self, "stochastic_rounding")
        check_flag(self, "hadamard")
        check_choice(self, "compute", ("exact",))

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        for name, size in (("in", in_features), ("out", out_features)):
            if size % NV_BLOCK:
                return f"NVFP4 needs {name}_features that are multiples of {NV_BLOCK}, got {size}"
        return None

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        return quantize_rows(x, split_sizes)

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        return quantize_columns(x, split_sizes, self.hadamard)

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return quantize_weight(weight)

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return quantize_weight(weight.mT)

    def row_values(self, rows: Rows, split_sizes: Tensor) -> Tensor:
        values = dequantize(rows).float()
        factors = F.pad(_group_scales(rows), (0, 1))
        return values * factors[groups_of(split_sizes, values.shape[0])].unsqueeze(-1)

    def column_values(self, columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
        blocks = token_blocks(split_sizes, rows, NV_BLOCK)
        values = dequantize(columns).float()
        if self.hadamard:  # sums are exact in double, so they are the same on every device
            values = (values.double() @ hadamard(values.device).double().t()).float()
        values = values * _group_scales(columns)[blocks.group].view(-1, 1, 1)
        return scatter(values.transpose(1, 2), blocks, rows)

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return dequantize(weight).float() * _group_scales(weight).view(-1, 1, 1)

    def row_operand(self, rows: Rows, split_sizes: Tensor) -> Rows:
        return Rows(dequantize(rows), None, rows.amax)

    def column_operand(self, columns: Columns, split_sizes: Tensor, rows: int) -> Columns:
        values = dequantize(columns).transpose(1, 2).flatten(0, 1).contiguous()  # of one block a view
        return Columns(values, None, columns.amax, filled_up(split_sizes))

    def weight_operand(self, weight: Weight, parts: int = 1) -> Weight:
        return Weight(dequantize(weight), None, weight.amax)

    def transposed_operand(self, weight: Weight) -> Weight:
        return self.weight_operand(weight)

    def rounding(self, x: Tensor, is_gradient: bool) -> dict[str, Any]:
        capture.refuse("PyTorch makes the factors of groups and the seeds of random numbers for NVFP4")
        seed = new_seed(x.device) if is_gradient and self.stochastic_rounding else None
        return {"is_transformed": self.hadamard, "seed": seed}

    def filled_sizes(self, split_sizes: Tensor) -> Tensor:
        return filled_up(split_sizes)


def quantize_rows(x: Tensor, split_sizes: Tensor, seed: Tensor | None = None) -> Rows:
    """``x`` [T, K] in blocks of 1 x 16: uint8 [T, K / 2], two codes a byte, the first one in the low bits.

    Scales are e4m3 [T, K / 16], and amax [E] is of each group, whose scale is ``amax / (6 * 448)``.

    Args:
        seed: of the random numbers that values are rounded by, :func:`~.random.new_seed`; None: to the nearest.
    """
    _check(x)
    blocks = split(x, -1, NV_BLOCK)
    group = groups_of(split_sizes, x.shape[0])
    amax = largest_by_group(amax_of(x, (1,)).squeeze(1), group, split_sizes.shape[0])
    by_row = F.pad(amax, (0, 1))[group].view(-1, 1, 1)
    random = None if seed is None else _random_of_rows(seed, split_sizes, group, x.shape[1]).view_as(blocks)
    codes, scales = _quantize(blocks, (2,), by_row, random)
    return Rows(pack(codes.flatten(1)), scales.squeeze(2), amax)


def _random_of_rows(seed: Tensor, split_sizes: Tensor, group: Tensor, features: int) -> Tensor:
    """A number for each value of rows [T, K], of which any in the tail."""
    starts = split_sizes.long().clamp(min=0).cumsum(0)
    row = torch.arange(group.shape[0], device=group.device) - F.pad(starts, (1, 0))[group]
    return uniform_of_rows(seed, 0, group, row, features)


def quantize_columns(
    x: Tensor,
    split_sizes: Tensor,
    is_transformed: bool = True,
    seed: Tensor | None = None,
) -> Columns:
    """``x`` [T, K] transposed, in blocks of 16 tokens of one group: [T // 16 + E, K, 16].

    Args:
        is_transformed: whether each block is multiplied by :func:`hadamard` first; its amax is then the products'.
        seed: as for :func:`quantize_rows`.
    """
    blocks = token_blocks(split_sizes, x.shape[0], NV_BLOCK)
    values = gather(x, blocks).transpose(1, 2)  # [blocks, K, 16]
    values = transform(values) if is_transformed else values
    amax = largest_by_group(amax_of(values, (1, 2)).flatten(), blocks.group, split_sizes.shape[0])
    random = None if seed is None else _random_of_columns(seed, split_sizes, blocks.group, x.shape[1])
    codes, scales = _quantize(values, (2,), amax[blocks.group].view(-1, 1, 1), random)
    return Columns(pack(codes), scales, amax)


def _random_of_columns(seed: Tensor, split_sizes: Tensor, group: Tensor, features: int) -> Tensor:
    """A number for each value of blocks [blocks, K, 16], of which any in unused ones."""
    first_blocks = F.pad((filled_up(split_sizes.long()) // NV_BLOCK).cumsum(0), (1, 0))[group]
    block = torch.arange(group.shape[0], device=group.device) - first_blocks
    row = block.unsqueeze(-1) * NV_BLOCK + torch.arange(NV_BLOCK, device=group.device)
    return uniform_of_rows(seed, 1, group.unsqueeze(-1).expand_as(row), row, features).transpose(1, 2)


def quantize_weight(weight: Tensor) -> Weight:
    """``weight`` [E, N, K] in blocks of 16 x 16; each of the rows of a block has its scale."""
    _check(weight)
    rows = weight.shape[1]
    amax = amax_of(weight, (1, 2)).flatten()
    blocks = split(split(weight, -1, NV_BLOCK), 1, NV_BLOCK)  # [E, blocks, 16, blocks, 16]
    codes, scales = _quantize(blocks, (2, 4), amax.view(-1, 1, 1, 1, 1))
    by_row = scales.squeeze(4).repeat_interleave(NV_BLOCK, 2).flatten(1, 2)[:, :rows]
    return Weight(pack(codes.flatten(3).flatten(1, 2)[:, :rows]), by_row.contiguous(), amax)


def _check(x: Tensor) -> None:
    if x.shape[-1] % NV_BLOCK:
        raise ValueError(f"NVFP4 needs features that are multiples of {NV_BLOCK}, got {x.shape[-1]}")


def _quantize(x: Tensor, dims: tuple[int, ...], amax: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of the shape of ``x``, and scales, of a size of 1 in the dimensions that a block spans.

    Args:
        random: a number for each value; None: it is rounded to the nearest.
    """
    most = torch.full_like(amax, torch.finfo(torch.float32).max)
    encode_group = encode_scales(amax)
    sixth = torch.ones_like(amax) / torch.full_like(amax, E2M1_MAX)
    scales = cast(torch.minimum(amax_of(x, dims) * (encode_group * sixth), most), E4M3)
    encode = torch.minimum(1 / (scales.float() * (torch.ones_like(amax) / encode_group)), most)
    values = x.float() * encode
    return cast_e2m1(values) if random is None else cast_e2m1_stochastic(values, random), scales


def encode_scales(amax: Tensor) -> Tensor:
    """float32, what the values of a group are multiplied by before its blocks are scaled."""
    encode = torch.full_like(amax, E2M1_MAX * E4M3.max) / amax
    encode = encode.clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax == 0) | amax.isinf(), 1.0, encode)


def _group_scales(quantised: Rows | Columns | Weight) -> Tensor:
    assert quantised.amax is not None
    return 1 / encode_scales(quantised.amax)


def dequantize(quantised: Rows | Columns | Weight) -> Tensor:
    """bfloat16 [..., K], without the scales of the groups."""
    assert quantised.scales is not None
    return block_values(quantised.data, quantised.scales)


@unpacks(PackedFormat.NVFP4, Decoding(Codes.E2M1, NV_BLOCK))
def block_values(data: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., K], exactly the codes times the scales of their blocks."""
    values = split(from_e2m1(unpack(data)), -1, NV_BLOCK)
    return (values * scales.float().unsqueeze(-1)).flatten(-2).bfloat16()


def filled_up(split_sizes: Tensor) -> Tensor:
    """The tokens of each group with those that fill its last block of 16."""
    return (split_sizes.clamp(min=0) + NV_BLOCK - 1) // NV_BLOCK * NV_BLOCK


def hadamard(device: torch.device | None = None) -> Tensor:
    """float32 [16, 16]: Sylvester's matrix, the signs of some rows changed, over 4; orthogonal.

    Made on the device: a graph cannot capture a copy from the host.
    """
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while matrix.shape[0] < NV_BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    is_negative = _NEGATIVE >> torch.arange(NV_BLOCK, device=device) & 1
    return (1 - 2 * is_negative).unsqueeze(1) * matrix / 4


def transform(x: Tensor) -> Tensor:
    """Vectors of 16 times :func:`hadamard`: sums are rounded once, to the type of ``x``."""
    return (x.double() @ hadamard(x.device).double()).to(x.dtype)
