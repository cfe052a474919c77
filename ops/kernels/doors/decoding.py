"""The door to decoding: the values of a weight that is kept in 8 or 4 bits, for one product.

PyTorch decodes by the definition of the format, a run of groups at a time. The result is memory of the caching
allocator, which the next product finds free again: nothing keeps a decoded weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....fuser.contract import tracing as trace
from ....fuser.replay import capture
from ...formats.copies import Weight
from ...formats.weight_only import WeightOnly
from ..operators.custom_ops import kernel
from ..problems.gemm import nbytes


def new_decoded(data: Tensor, like: Tensor, recipe: WeightOnly) -> Tensor:
    """Memory for the values."""
    groups, rows, packed = data.shape
    return data.new_empty((groups, rows, packed * recipe.values_in_byte), dtype=like.dtype)


@kernel(new_decoded, obeys_switches=False)
def decode_weight(data: Tensor, scales: Tensor, factors: Tensor | None, like: Tensor, recipe: WeightOnly) -> Tensor:
    """[E, N, K], in the dtype of ``like``: the values of stored parts, rounded once from float32.

    Args:
        data, scales, factors: the parts of a weight under the recipe.
        like: a tensor of the product that reads the values. In a backward it is a gradient: so a compiler decodes
            there again, and saves no values of the forward.
    """
    if trace.active():
        values = data.numel() * recipe.values_in_byte
        moved, bits = nbytes(data, scales) + values * like.itemsize, recipe.bits(values // data[..., 0].numel())
        words = (
            f"{recipe.name}, {' x '.join(map(str, data.shape))} bytes, {bits:.3g} bits a weight, {moved / 1e6:.1f} MB"
        )
        why = f"no kernel for {recipe.name}" if data.is_cuda else ""
        trace.record(trace.KernelCall(f"torch (decode {recipe.name})", why, 0, moved, words))
    if trace.has_no_data(data) or data.is_meta:
        return new_decoded(data, like, recipe)
    capture.refuse(f"PyTorch decodes {recipe.name}")
    with torch.no_grad():
        return recipe.decoded(Weight(data, scales, factors), like.dtype)
