"""The door to fake quantisers: the values of the copies that a recipe says, for products that are computed in 16 bits.

Bytes and scales are never in memory. The values are those of dequantised copies, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...formats.copies import PackedFormat
from ...formats.nvfp4 import NV_BLOCK
from ..dispatch import run
from ..operators.custom_ops import kernel
from ..problems.fake_quantized import FakeQuantizeRows, FakeQuantizeWeight
from ..problems.gemm import Matrices, first


class TokenValues(NamedTuple):
    """The fields of a :class:`FakeQuantizeRows` that are filled; None for unwanted ones."""

    rows: Tensor | None
    columns: Tensor | None
    row_amax: Tensor | None
    column_amax: Tensor | None


class WeightValues(NamedTuple):
    """The fields of a :class:`FakeQuantizeWeight` that are filled; None for unwanted ones."""

    rows: Tensor | None
    columns: Tensor | None
    amax: Tensor | None


def new_token_values(
    x: Tensor,
    split_sizes: Tensor,
    format: PackedFormat,
    want_rows: bool,
    want_columns: bool,
    slot_of_row: Tensor | None,
) -> TokenValues:
    """Memory for the wanted values of rows like ``x``, or of as many as there are slots."""
    (groups,), is_nv = split_sizes.shape, format is PackedFormat.NVFP4
    tokens, features = x.shape[0] if slot_of_row is None else slot_of_row.shape[0], x.shape[1]
    by_column = (tokens // NV_BLOCK + groups) * NV_BLOCK if is_nv else tokens

    def values(wanted: bool, number: int) -> Tensor | None:
        return x.new_empty((number, features), dtype=torch.bfloat16) if wanted else None

    def amax(wanted: bool) -> Tensor | None:  # zeros, as they are not written if there are no rows
        return x.new_zeros((groups,), dtype=torch.float32) if wanted and is_nv else None

    wanted = want_rows, want_columns
    return TokenValues(values(want_rows, tokens), values(want_columns, by_column), *map(amax, wanted))


def new_weight_values(weight: Matrices, format: PackedFormat, want_rows: bool, want_columns: bool) -> WeightValues:
    """Memory for the wanted values of a weight."""
    one, groups = first(weight), weight.shape[0] if isinstance(weight, Tensor) else len(weight)

    def values(wanted: bool) -> Tensor | None:
        return one.new_empty((groups, *one.shape[-2:]), dtype=torch.bfloat16) if wanted else None

    amax = one.new_empty((groups,), dtype=torch.float32) if format is PackedFormat.NVFP4 else None
    return WeightValues(values(want_rows), values(want_columns), amax)


@kernel(new_token_values)
def fake_quantize_rows(
    x: Tensor,
    split_sizes: Tensor,
    format: PackedFormat,
    *,
    want_rows: bool = True,
    want_columns: bool = False,
    is_transformed: bool = False,
    seed: Tensor | None = None,
    slot_of_row: Tensor | None = None,
    top_k: int = 1,
) -> TokenValues:
    """The values of the wanted copies of rows [T, K]; see :class:`FakeQuantizeRows`."""
    out = new_token_values(x, split_sizes, format, want_rows, want_columns, slot_of_row)
    run(FakeQuantizeRows(x, split_sizes, format, *out, is_transformed, seed, slot_of_row, top_k))
    return out


@kernel(new_weight_values)
def fake_quantize_weight(
    weight: Matrices, format: PackedFormat, *, want_rows: bool = True, want_columns: bool = False
) -> WeightValues:
    """The values of the wanted copies of a weight [E, N, K]; see :class:`FakeQuantizeWeight`."""
    out = new_weight_values(weight, format, want_rows, want_columns)
    run(FakeQuantizeWeight(weight, format, *out))
    return out
