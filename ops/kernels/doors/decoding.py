"""The door to decoding: the values of a weight that is kept in 8 or 4 bits, for one product.

The result is memory of the caching allocator, which the next product finds free again: nothing keeps a decoded weight.
Where no kernel decodes a format, PyTorch does by its definition. A large weight is decoded and multiplied a run of
groups at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ....fuser.contract import tracing as trace
from ...formats.copies import PackedFormat, Weight
from ...formats.packed import DECODINGS, new_unpacked, unpack_into, values_in_byte
from ...formats.weight_only import WeightOnly
from .. import dispatch, grouped_gemm
from ..hopper import gemm
from ..operators.custom_ops import kernel
from ..problems.decoding import WeightDecoding
from ..problems.gemm import Layout

RUN_BYTES = 1 << 30
"""The most memory of the values of several groups."""


def decoding_runs(data: Tensor, values_in_byte: int, like: Tensor) -> list[slice]:
    """Runs of groups of a weight that are decoded and multiplied one after the other.

    There is one for kernels that multiply all groups at once, and for a compiler, which frees values where it likes.
    """
    groups, rows, columns = data.shape[0], data.shape[1], data.shape[2] * values_in_byte
    step = max(1, RUN_BYTES // max(1, rows * columns * like.itemsize))
    if step >= groups or trace.is_traced(like) or not _multiplies_runs(like, groups, rows, columns):
        return [slice(0, groups)]
    return [slice(first, min(first + step, groups)) for first in range(0, groups, step)]


def multiply_runs(
    runs: list[slice],
    decode: Callable[[slice], Tensor],
    layout: Layout,
    rows: Tensor,
    split_sizes: Tensor,
    **options: Any,
) -> Tensor:
    """The product of rows and a weight that is decoded for it; with options of :func:`grouped_gemm`.

    The values of a run are freed before the next run is decoded. Results have the bits of a single run.
    """
    y = options.pop("out", None)
    for run in runs:
        first_group = None if len(runs) == 1 else run.start
        y = grouped_gemm(layout, rows, decode(run), split_sizes, out=y, first_group=first_group, **options)
    assert isinstance(y, Tensor)
    return y


def _multiplies_runs(rows: Tensor, groups: int, *features: int) -> bool:
    if gemm.features_refusal(*features) is not None or not dispatch.allows(gemm.NAME):
        return False
    return gemm.operands_refusal(rows, rows, rows, groups) is None


def new_decoded(data: Tensor, like: Tensor, recipe: WeightOnly) -> Tensor:
    """Memory for the values."""
    groups, rows, packed = data.shape
    return data.new_empty((groups, rows, packed * recipe.values_in_byte), dtype=like.dtype)


@kernel(new_decoded)
def decode_weight(data: Tensor, scales: Tensor, factors: Tensor | None, like: Tensor, recipe: WeightOnly) -> Tensor:
    """[E, N, K], in the dtype of ``like``: the values of stored parts, rounded once from float32.

    Args:
        data, scales, factors: the parts of a weight under the recipe.
        like: a tensor of the product that reads the values. In a backward it is a gradient: so a compiler decodes
            there again, and saves no values of the forward.
    """
    out = new_decoded(data, like, recipe)
    define = partial(recipe.decode_into, weight=Weight(data, scales, factors))
    dispatch.run(WeightDecoding(data, scales, factors, out, recipe.name, recipe.decoding, define))
    return out


def multiply_unpacked(
    layout: Layout,
    rows: Tensor,
    data: Tensor,
    scales: Tensor,
    split_sizes: Tensor,
    format: PackedFormat,
    **options: Any,
) -> Tensor:
    """The product of rows and a weight that :func:`decode_packed` decodes for it, as :func:`multiply_runs` does."""
    return multiply_runs(
        decoding_runs(data, values_in_byte(format), rows),
        lambda run: decode_packed(data[run], scales[run], format),
        *(layout, rows, split_sizes),
        **options,
    )


def decode_packed(data: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """bfloat16 [E, N, K], but for the factors of groups: the values of a weight that stays as it is."""
    out = new_unpacked(data, format)
    define = partial(unpack_into, data=data, scales=scales, format=format)
    dispatch.run(WeightDecoding(data, scales, None, out, format.value, DECODINGS[format], define))
    return out
