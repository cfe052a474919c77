"""When weights are quantised: at every forward, or once in a :func:`same_weights` block.

No version of a parameter says whether it has changed. Fused optimisers, ``.data`` and flat buffers of parameters write
weights without counting. So copies are kept only where a caller promises that the weights stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import tracing as trace
from ..fuser.config import active_config, changed
from ..fuser.replay import capture
from .kernels import Matrices
from .kernels.problem import first
from .kernels.quantized import quantize_weight
from .quantized.copies import SCALES, QuantizedWeight
from .quantized.reference import dequantize_weight


class _Kept(NamedTuple):
    """Copies, and the weight that they are of: alive, its address stays its own."""

    weight: Matrices
    copies: QuantizedWeight


_kept: dict[tuple[Any, ...], _Kept] = {}
_blocks = 0


@contextmanager
def same_weights() -> Iterator[None]:
    """In the body, weights stay as they are: each is quantised once, whatever the number of forwards.

    For the microbatches of a step. A weight that is changed in the body is not seen to have changed before its end.
    The promise is of this thread, and of all weights that it uses. Memory: two bytes a parameter, until the end.

    Raises:
        RuntimeError: a CUDA graph is captured in the body by a call that would read kept copies: its replays would not
            see later weights.
    """
    global _blocks
    _blocks += 1
    try:
        with changed(same_weights=True):
            yield
    finally:
        _blocks -= 1
        if not _blocks:
            _kept.clear()


def copies_of_weight(weight: Matrices, *, power_of_two: bool, both: bool) -> QuantizedWeight:
    """The copies of a weight [E, N, K]; ``both``: also the transposed bytes, which the gradient of rows reads."""
    one = first(weight)
    if not active_config().same_weights or trace.active() or trace.has_no_data(one):
        return quantize_weight(weight, power_of_two=power_of_two, both=both)
    capture.refuse("copies of weights are kept between calls")
    if one.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("same_weights: a CUDA graph would replay with the weights of now; capture outside of it")
    key = power_of_two, *_identity(weight)
    kept = _kept.get(key)
    if kept is None or (both and kept.copies.transposed is None):
        kept = _kept[key] = _Kept(weight, quantize_weight(weight, power_of_two=power_of_two, both=both))
    return kept.copies


def _identity(weight: Matrices) -> tuple[Any, ...]:
    """Which memory it is, read as what."""
    one = first(weight)
    addresses = (one.data_ptr(),) if isinstance(weight, Tensor) else tuple([matrix.data_ptr() for matrix in weight])
    return addresses, weight.shape if isinstance(weight, Tensor) else one.shape, one.stride(), one.dtype, one.device


def match_state(linear: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Makes what a state dict has for a linear of the kind that the linear has.

    A weight that is not quantised becomes one that is, or the other way, with a warning: its values have been rounded.
    """
    name, scales_name = f"{prefix}weight", f"{prefix}{SCALES}"
    weight, scales = state_dict.get(name), state_dict.get(scales_name)
    if not isinstance(weight, Tensor):
        return
    if linear.is_quantized and scales is None and weight.dtype.itemsize > 1:
        power_of_two = getattr(linear.recipe, "scales", "") == "power_of_two"
        copies = quantize_weight(weight, power_of_two=power_of_two)
        state_dict |= {name: copies.data, scales_name: copies.scales}
    elif linear.is_quantized and isinstance(scales, Tensor) and scales.dtype != torch.float32:
        state_dict[scales_name] = scales.float()
    elif not linear.is_quantized and isinstance(scales, Tensor):
        warnings.warn(f"{name} is quantised and the module is not: its rounded values are loaded", stacklevel=2)
        values = dequantize_weight(QuantizedWeight(weight, None, scales.float()), 1)
        state_dict[name] = values.mT if linear.transposed_weight else values
        del state_dict[scales_name]
