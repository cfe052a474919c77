"""One scale for the rows of a group: :class:`~fusible.Float8Tensor`, from the rows themselves or from past amaxes.

The rule is that of ``reference.py``. The bytes of a transposed copy are those of the other, so one set of scales [E]
serves both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats import E4M3, Format, cast, power_of_two
from .recipe import Delayed
from .reference import Blocks, amax_of, decode_scales, encode_scales, gather, groups_of, largest_by_group, token_blocks


class DelayedScales(NamedTuple):
    """What a tensor with delayed scaling carries from step to step.

    Attributes:
        history: float32 [history, E]: row 0 is of the step that runs, the last rows of those before.
        encode: float32 [E], what the values of this step are multiplied by.
    """

    history: Tensor
    encode: Tensor

    @classmethod
    def first(cls, groups: int, delayed: Delayed, device: torch.device | None = None) -> DelayedScales:
        """Before the first step: scales are 1."""
        return cls(torch.zeros(delayed.history, groups, device=device), torch.ones(groups, device=device))

    def seen(self, amax: Tensor) -> DelayedScales:
        """With the amaxes of this step, which may have several calls."""
        return self._replace(history=torch.cat((torch.fmax(self.history[:1], amax.unsqueeze(0)), self.history[1:])))

    def next(self, delayed: Delayed, format: Format = E4M3, is_power_of_two: bool = False) -> DelayedScales:
        """For the next step. A scale stays where no amax is positive and finite."""
        amax = self.history.amax(0)
        most = torch.full_like(amax, format.max * 2.0**-delayed.margin)
        encode = torch.where(amax.isfinite() & (amax > 0), most / amax, self.encode)
        encode = encode.clamp(max=torch.finfo(torch.float32).max)
        encode = power_of_two(encode) if is_power_of_two else encode
        rolled = self.history.roll(-1, 0)
        return DelayedScales(torch.cat((torch.zeros_like(rolled[:1]), rolled[1:])), encode)


def amax_by_group(x: Tensor, split_sizes: Tensor) -> Tensor:
    """float32 [E], of the rows of each group of ``x`` [T, K]; the tail counts for nothing."""
    groups = split_sizes.shape[0]
    return largest_by_group(amax_of(x, (1,)).squeeze(1), groups_of(split_sizes, x.shape[0]), groups)


def quantize_rows(
    x: Tensor, split_sizes: Tensor, is_power_of_two: bool, format: Format = E4M3, encode: Tensor | None = None
) -> Blocks:
    """Bytes [T, K] and a scale for each group [E]; with the encode scales that are given, if any are."""
    amax = amax_by_group(x, split_sizes)
    scales = encode_scales(amax, is_power_of_two, format, x.dtype) if encode is None else encode
    by_row = F.pad(scales, (0, 1), value=1.0)[groups_of(split_sizes, x.shape[0])]
    return Blocks(cast(x.float() * by_row.unsqueeze(-1), format), decode_scales(scales, amax))


def transposed_rows(rows: Blocks, split_sizes: Tensor) -> Tensor:
    """The bytes in blocks of 128 tokens [blocks, K, 128], as of :class:`BlockedColumns`."""
    blocks = token_blocks(split_sizes, rows.data.shape[0])
    data = gather(rows.data.view(torch.uint8), blocks).view(rows.data.dtype)
    return data.transpose(1, 2).contiguous()


def quantize_weight(
    weight: Tensor, is_power_of_two: bool, format: Format = E4M3, encode: Tensor | None = None
) -> Blocks:
    """Bytes [E, N, K] and a scale for each matrix [E], from ``encode`` [E] if given; transposed bytes are the same."""
    amax = amax_of(weight, (1, 2))
    if encode is None:
        encode = encode_scales(amax, is_power_of_two, format, weight.dtype)
    encode = encode.view(-1, 1, 1)
    return Blocks(cast(weight.float() * encode, format), decode_scales(encode, amax).flatten())


def dequantize_rows(rows: Blocks, split_sizes: Tensor) -> Tensor:
    """float32 [T, K]; the tail is zero."""
    by_row = F.pad(rows.scales, (0, 1))[groups_of(split_sizes, rows.data.shape[0])]
    values = rows.data.float() * by_row.unsqueeze(-1)
    return values.masked_fill(groups_of(split_sizes, len(values)).unsqueeze(-1) == len(rows.scales), 0)


def dequantize_weight(weight: Blocks) -> Tensor:
    """float32 [E, N, K]."""
    return weight.data.float() * weight.scales.view(-1, 1, 1)
