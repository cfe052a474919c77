"""The door to decoding: the values of a weight that is kept in 8 or 4 bits, for one product.

The result is memory of the caching allocator, which the next product finds free again: nothing keeps a decoded weight.
Where no kernel decodes a format, PyTorch does by its definition.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...formats.copies import PackedFormat, Weight
from ...formats.packed import DECODINGS, new_unpacked, unpack_into
from ...formats.weight_only import WeightOnly
from .. import dispatch
from ..operators.custom_ops import kernel
from ..problems.decoding import WeightDecoding


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


def decode_packed(data: Tensor, scales: Tensor, format: PackedFormat) -> Tensor:
    """bfloat16 [E, N, K], but for the factors of groups: the values of a weight that stays as it is."""
    out = new_unpacked(data, format)
    define = partial(unpack_into, data=data, scales=scales, format=format)
    dispatch.run(WeightDecoding(data, scales, None, out, format.value, DECODINGS[format], define))
    return out
