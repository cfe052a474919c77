"""One scale for the rows of a group: :class:`~fusible.Float8Tensor`, from the rows themselves or from past amaxes.

The rule is that of ``reference.py``. The bytes of a transposed copy are those of the other, so one set of scales [E]
serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...fuser.contract.errors import shown
from .copies import Columns, Rows, Scaling, Weight
from .float8 import Float8, ScaleKind, tokens_of
from .formats import E4M3, Format, cast
from .recipe import Recipe, Steps, register, transposed_bytes
from .reference import amax_of, decode_scales, encode_scales, gather, groups_of, largest_by_group, token_blocks


@register
@dataclass(frozen=True)
class Float8Tensor(Float8):
    """e4m3 with one scale for all rows of a group, and one for each expert's weight.

    Attributes:
        scales, gradient, wgrad, fast_accumulation: as for :class:`Float8Row`.
        delayed: the rule for scales from past amaxes, which a linear with its own recipe keeps in buffers; None: scales
            come from the tensor itself.

    Raises:
        ValueError: another value.
    """

    scaling: ClassVar[Scaling] = Scaling.GROUPS
    has_one_copy: ClassVar[bool] = True
    scales: ScaleKind = "float32"
    fast_accumulation: bool = False
    delayed: Steps | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delayed is not None and not isinstance(self.delayed, Steps):
            raise ValueError(f"Float8Tensor: delayed must be a Delayed or None, got {shown(self.delayed)}")

    @property
    def steps(self) -> Steps | None:
        return self.delayed

    def on(self, linear: nn.Module, tensor: str, values: Tensor, split_sizes: Tensor | None = None) -> Recipe:
        if self.delayed is None:
            return self
        return self.delayed.advanced(self, linear, tensor, values, split_sizes)

    def scales_of_forward(self, linear: nn.Module) -> Tensor | None:
        return None if self.delayed is None else self.delayed.of_forward(linear)

    def with_scales(self, encode: Tensor | None) -> Float8Tensor:
        if encode is None:
            return self
        return ScaledFloat8Tensor(
            **{field.name: getattr(self, field.name) for field in fields(Float8Tensor)}, encode=encode
        )

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        self._check_scales()
        return quantize_rows(x, split_sizes, self.is_power_of_two, self.format(is_gradient), self.encode)

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        rows = self.rows(x, split_sizes, is_gradient)
        return Columns(transposed_rows(rows, split_sizes), rows.scales)

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        self._check_scales()
        return quantize_weight(weight, self.is_power_of_two, self.format(is_gradient), self.encode)

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        data, scales, *_ = self.weight(weight, parts, is_gradient)
        return Weight(data.mT.contiguous(), scales)

    def _check_scales(self) -> None:
        if self.steps is not None and self.encode is None:
            raise ValueError(f"{self} takes its scales from earlier steps, which a linear keeps in training")

    def row_values(self, rows: Rows, split_sizes: Tensor) -> Tensor:
        return dequantize_rows(rows, split_sizes)

    def column_values(self, columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
        assert columns.scales is not None
        scales = columns.scales[token_blocks(split_sizes, rows).group]
        return tokens_of(columns.data.float() * scales.view(-1, 1, 1), split_sizes, rows)

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return dequantize_weight(weight)

    def row_operand(self, rows: Rows, split_sizes: Tensor) -> Rows:
        assert rows.scales is not None
        group = groups_of(split_sizes, rows.data.shape[0])
        return Rows(rows.data, F.pad(rows.scales, (0, 1), value=1.0)[group])

    def column_operand(self, columns: Columns, split_sizes: Tensor, rows: int) -> Columns:
        assert columns.scales is not None
        by_block = columns.scales[token_blocks(split_sizes, rows).group].unsqueeze(-1)
        return Columns(columns.data, by_block.expand(columns.data.shape[:2]).contiguous())

    def weight_operand(self, weight: Weight, parts: int = 1) -> Weight:
        assert weight.scales is not None
        return Weight(weight.data, weight.scales.unsqueeze(-1).expand(weight.data.shape[:2]))

    def turned(
        self, weight: Weight, parts: int = 1, transpose: Callable[[Tensor], Tensor] = transposed_bytes
    ) -> Weight:
        return self.weight_operand(Weight(transpose(weight.data), weight.scales))

    def token_operands(
        self, x: Tensor, split_sizes: Tensor, rows: bool, columns: bool, is_gradient: bool = False
    ) -> tuple[Rows | None, Columns | None]:
        """Quantises once: rows and columns have the same bytes."""
        copy = self.rows(x, split_sizes, is_gradient)
        by_row = self.row_operand(copy, split_sizes) if rows else None
        if not columns:
            return by_row, None
        by_column = Columns(transposed_rows(copy, split_sizes), copy.scales)
        return by_row, self.column_operand(by_column, split_sizes, x.shape[0])


@dataclass(frozen=True, eq=False)
class ScaledFloat8Tensor(Float8Tensor):
    """A :class:`Float8Tensor` for one tensor with known scales.

    Attributes:
        encode: float32 [E], the factor of the values of each group.
    """

    encode: Tensor | None = None

    @property
    def name(self) -> str:
        return Float8Tensor.__name__


def amax_by_group(x: Tensor, split_sizes: Tensor) -> Tensor:
    """float32 [E], of the rows of each group of ``x`` [T, K]; the tail counts for nothing."""
    groups = split_sizes.shape[0]
    return largest_by_group(amax_of(x, (1,)).squeeze(1), groups_of(split_sizes, x.shape[0]), groups)


def quantize_rows(
    x: Tensor, split_sizes: Tensor, is_power_of_two: bool, format: Format = E4M3, encode: Tensor | None = None
) -> Rows:
    """Bytes [T, K] and a scale for each group [E]; with the encode scales that are given, if any are."""
    amax = amax_by_group(x, split_sizes)
    scales = encode_scales(amax, is_power_of_two, format, x.dtype) if encode is None else encode
    by_row = F.pad(scales, (0, 1), value=1.0)[groups_of(split_sizes, x.shape[0])]
    return Rows(cast(x.float() * by_row.unsqueeze(-1), format), decode_scales(scales, amax))


def transposed_rows(rows: Rows, split_sizes: Tensor) -> Tensor:
    """The bytes in blocks of 128 tokens [blocks, K, 128], as of :class:`Columns`."""
    blocks = token_blocks(split_sizes, rows.data.shape[0])
    data = gather(rows.data.view(torch.uint8), blocks).view(rows.data.dtype)
    return data.transpose(1, 2).contiguous()


def quantize_weight(
    weight: Tensor, is_power_of_two: bool, format: Format = E4M3, encode: Tensor | None = None
) -> Weight:
    """Bytes [E, N, K] and a scale for each matrix [E], from ``encode`` [E] if given; transposed bytes are the same."""
    amax = amax_of(weight, (1, 2))
    if encode is None:
        encode = encode_scales(amax, is_power_of_two, format, weight.dtype)
    encode = encode.view(-1, 1, 1)
    return Weight(cast(weight.float() * encode, format), decode_scales(encode, amax).flatten())


def dequantize_rows(rows: Rows, split_sizes: Tensor) -> Tensor:
    """float32 [T, K]; the tail is zero."""
    assert rows.scales is not None
    by_row = F.pad(rows.scales, (0, 1))[groups_of(split_sizes, rows.data.shape[0])]
    values = rows.data.float() * by_row.unsqueeze(-1)
    return values.masked_fill(groups_of(split_sizes, len(values)).unsqueeze(-1) == len(rows.scales), 0)


def dequantize_weight(weight: Weight) -> Tensor:
    """float32 [E, N, K]."""
    assert weight.scales is not None
    return weight.data.float() * weight.scales.view(-1, 1, 1)
