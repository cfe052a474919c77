"""NF4, bitsandbytes' format: one of 16 quantiles of a normal distribution, times the largest magnitude of 64 values.

A byte has the first code in its high bits. With double quantisation the magnitudes are bytes themselves, codes of a map
of 256 numbers. Values are ``table[code] * absmax``, with ``absmax = map[byte] * nested_absmax + offset``, where each
operation rounds to float32, as in bitsandbytes' kernels. Gate and up that were quantised one by one are two sections of
the rows, each of which has its own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...fuser.contract.tracing import has_no_data
from .copies import Weight
from .decoding import Codes, Decoding
from .nibbles import looked_up, scaled_by_block, table_of_bytes
from .nvfp4_weight import sections_refusal
from .recipe import check_choice, check_flag, register
from .reference import split
from .weight_only import WeightOnly

NF4_BLOCK = 64
NESTED_BLOCK = 256
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MAP_AND_OFFSET = 257


class Nested(NamedTuple):
    """The decoders of double quantisation: ``absmax`` [E, blocks], ``map`` [E, 256], ``offset`` [E, 1], float32.

    Under sections E counts those of all groups.
    """

    absmax: Tensor
    map: Tensor
    offset: Tensor

    @classmethod
    def of(cls, joined: Tensor) -> Nested:
        """Views of the three, which are stored one after the other."""
        return cls(joined[:, :-_MAP_AND_OFFSET], joined[:, -_MAP_AND_OFFSET:-1], joined[:, -1:])

    def joined(self) -> Tensor:
        """The inverse of :meth:`of`."""
        return torch.cat(self, 1)


@register
@dataclass(frozen=True)
class NF4(WeightOnly):
    """Weights in bitsandbytes' NF4: 16 quantiles of a normal distribution, with a scale for each 64 values of a row.

    Attributes:
        nested: whether the scales are bytes (double quantisation), which float32 numbers of each group decode.
        sections: with ``nested``, 2 if gate and up have such numbers of their own; else 1.

    Raises:
        ValueError: another value.
    """

    nested: bool = False
    sections: int = 1
    values_in_byte: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_flag(self, "nested")
        check_choice(self, "sections", (1, 2) if self.nested else (1,))  # type: ignore[arg-type]

    def size_refusal(self, in_features: int, out_features: int) -> str | None:
        if in_features % NF4_BLOCK:
            return f"NF4 needs in_features that are multiples of {NF4_BLOCK}, got {in_features}"
        return sections_refusal(self.name, self.sections, out_features)

    @property
    def decoding(self) -> Decoding:
        return Decoding(Codes.NF4, NF4_BLOCK, sections=self.sections)

    def bits(self, in_features: int) -> float:
        return 4 + (8 + 32 / NESTED_BLOCK if self.nested else 32) / NF4_BLOCK

    def quantize(self, weight: Tensor) -> Weight:
        blocks = split(weight.float(), -1, NF4_BLOCK)
        absmax = blocks.abs().amax(-1)
        scaled = blocks / torch.where(absmax == 0, 1.0, absmax).unsqueeze(-1)
        table = _table_on(weight.device)
        codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).to(torch.uint8).flatten(-2)
        data = codes[..., ::2] << 4 | codes[..., 1::2]
        return Weight(data, *_nested(absmax, self.sections)) if self.nested else Weight(data, absmax)

    def values(self, weight: Weight) -> Tensor:
        assert weight.scales is not None
        values, absmax = looked_up(weight.data, _pairs(weight.data)), weight.scales
        return scaled_by_block(values, absmax if weight.amax is None else _absmax(absmax, weight.amax, self.sections))


def _table_on(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.float32, device=device)


def _pairs(data: Tensor) -> Tensor:
    """float32 [256, 2]: the two values of each byte, on the device of the bytes.

    The host copies them there once: a copy in each call would wait for a GPU, and a CUDA graph cannot capture it.
    """
    return (_pairs_on.__wrapped__ if has_no_data(data) else _pairs_on)(data.device)


@cache
def _pairs_on(device: torch.device) -> Tensor:
    return table_of_bytes(_table_on(device), high_first=True)


def _absmax(codes: Tensor, joined: Tensor, sections: int) -> Tensor:
    """The scales [E, N, blocks] of codes of that shape."""
    flat = codes.reshape(len(codes) * sections, -1)
    nested = Nested.of(joined.reshape(len(flat), -1))
    of_blocks = nested.absmax.repeat_interleave(NESTED_BLOCK, 1)[:, : flat.shape[1]]
    return (nested.map.gather(1, flat.long()) * of_blocks + nested.offset).view(codes.shape)


def _nested(absmax: Tensor, sections: int) -> tuple[Tensor, Tensor]:
    """Codes of scales [E, N, blocks], and what decodes them: the map of bitsandbytes, and the mean as the offset."""
    groups, rows, blocks_of_row = absmax.shape
    flat = absmax.reshape(groups * sections, rows // sections * blocks_of_row)
    offset = flat.mean(1, keepdim=True)
    blocks = split(flat - offset, 1, NESTED_BLOCK)
    largest = blocks.abs().amax(-1)
    map = dynamic_map(absmax.device)
    scaled = blocks / torch.where(largest == 0, 1.0, largest).unsqueeze(-1)
    codes = torch.bucketize(scaled, (map[1:] + map[:-1]) / 2).to(torch.uint8).flatten(1)[:, : flat.shape[1]]
    joined = Nested(largest, map.expand(len(flat), -1), offset).joined()
    return codes.reshape(absmax.shape).contiguous(), joined.reshape(groups, sections * joined.shape[1])


def dynamic_map(device: torch.device | None = None) -> Tensor:
    """float32 [256], ascending: bitsandbytes' signed dynamic map, of a sign, an exponent of ten and a linear part."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += [*means, *[-mean for mean in means]]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)
