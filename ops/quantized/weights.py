"""The moment when weights are quantised: at every forward, or once in a :func:`same_weights` block.

A parameter's version does not show that it has changed: fused optimisers, ``.data`` and flat buffers of parameters
write weights without raising it. So copies are kept only if a caller promises that the weights do not change.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser.contract import tracing as trace
from ...fuser.contract.config import changed
from ...fuser.contract.torch_private import storage_id
from ...fuser.replay import capture
from ..formats.copies import AMAX, SCALES, Weight, WeightOperands
from ..formats.forms import misfit, misfits, recipe_of, widened
from ..formats.recipe import Recipe
from ..kernels import Matrices
from ..kernels.problems.gemm import first
from ..values.switches import active_switches
from .gathered_weights import GatheredWeight
from .operands import weight_operands

_INSIDE = (__name__.partition(".")[0], "torch")


class _Kept(NamedTuple):
    """Quantised copies, and their weight: while it is alive, its storage is not used again."""

    weight: Matrices
    copies: WeightOperands


class _Block(local):
    """The copies of the outermost block that this thread is in; None outside of blocks.

    The switch ``same_weights`` reaches further: a backward has the switches of its forward, whenever and in whichever
    thread it runs. A recomputation there quantises anew, as no block's promise holds.
    """

    copies: dict[tuple[Any, ...], _Kept] | None = None


_block = _Block()


@contextmanager
def same_weights() -> Iterator[None]:
    """Promises that weights do not change in the body: each is quantised once for any number of forwards.

    Use it for the microbatches of a step. A change of a weight in the body has no effect until its end. The promise
    holds for this thread and all weights that it uses; other threads have blocks and copies of their own. Nested blocks
    of a thread are one block. The copies take two bytes a parameter until the end.

    Raises:
        RuntimeError: a call in the body that would read kept copies captures a CUDA graph, whose replays would not see
            later weights.
    """
    around = _block.copies
    if around is None:
        _block.copies = {}
    try:
        with changed(same_weights=True):
            yield
    finally:
        _block.copies = around


def operands_of(recipe: Recipe, weight: Matrices, both: bool) -> WeightOperands:
    """The operands of products with a weight [E, N, K]; ``both``: also that of the gradient of rows."""
    if isinstance(weight, GatheredWeight):
        return weight.operands(both)
    one = first(weight)
    copies = _block.copies if active_switches().same_weights else None
    if copies is None or trace.active() or trace.has_no_data(one):
        return weight_operands(recipe, weight, both)
    capture.refuse("copies of weights are kept between calls")
    if one.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("same_weights: a CUDA graph would replay with stale weights; capture outside of it")
    key = recipe, *_identity(weight)
    kept = copies.get(key)
    if kept is None or (both and kept.copies.backward is None):
        kept = copies[key] = _Kept(weight, weight_operands(recipe, weight, both))
    return kept.copies


def _identity(weight: Matrices) -> tuple[Any, ...]:
    """Which memory it is, read as what.

    By storage, not by address: FSDP2 frees the memory of gathered weights and gathers others there, and these again
    elsewhere, into the storage that they had.
    """
    one = first(weight)
    parts = (weight,) if isinstance(weight, Tensor) else weight
    storages = tuple([(storage_id(part), part.storage_offset()) for part in parts])
    return storages, weight.shape if isinstance(weight, Tensor) else one.shape, one.stride(), one.dtype, one.device


class _Names(NamedTuple):
    """The keys of a state dict for the weight of a linear: for one tensor or many, and for its decode scales."""

    weight: str
    scales: str
    amax: str
    many: list[str]

    @classmethod
    def of(cls, prefix: str, groups: int) -> _Names:
        many = [f"{prefix}weight{i}" for i in range(groups)]
        return cls(f"{prefix}weight", f"{prefix}{SCALES}", f"{prefix}{AMAX}", many)


def match_state(linear: Any, state_dict: dict[str, Any], prefix: str) -> str | None:
    """Converts the weight of a state dict to the kind of the linear's weight, or returns why that is impossible.

    Quantising and dequantising warn, because values have been rounded.
    """
    names = _Names.of(prefix, linear.num_groups)
    weight, scales = state_dict.get(names.weight), state_dict.get(names.scales)
    if weight is None and _have_one_shape([state_dict.get(name) for name in names.many]):
        weight = torch.stack([state_dict[name].data for name in names.many])
    if not isinstance(weight, Tensor):
        is_alone = isinstance(scales, Tensor) and state_dict.keys().isdisjoint((names.weight, *names.many))
        return f"{names.weight} is missing, and {names.scales} is there" if is_alone else None
    if isinstance(scales, Tensor):
        return _match_bytes(linear, state_dict, names, Weight(weight, scales, state_dict.get(names.amax)))
    if weight.dtype.itemsize == 1:
        return f"{names.weight} is {weight.dtype}, and {names.scales} is missing: bytes have no meaning without scales"
    if linear.is_quantized and weight.shape == linear.weight_shape:
        _replace(state_dict, names, linear.recipe.weight(weight).tensors)
    return None


def _match_bytes(linear: Any, state_dict: dict[str, Any], names: _Names, copy: Weight) -> str | None:
    """:func:`match_state` of a weight with scales."""
    shape = linear.weight_shape
    recipe: Recipe | None = linear.recipe if linear.is_quantized else recipe_of(shape, copy)
    if recipe is None:
        return f"{names.weight.removesuffix('weight')}{misfits(shape, copy)}"
    copy = widened(recipe, shape, copy)
    if (why := misfit(recipe, shape, copy)) is not None:
        return f"{names.weight.removesuffix('weight')}{why}"
    if linear.is_quantized:
        state_dict[names.scales] = copy.scales
        return None
    message = f"{names.weight} is quantised and the module is not: its rounded values are loaded"
    warnings.warn(message, stacklevel=_level_outside())
    rounded = recipe.weight_values(copy)
    _replace(state_dict, names, [rounded.mT if linear.transposed_weight else rounded])
    return None


def _level_outside() -> int:
    """The ``stacklevel`` of the first caller outside of this package and of torch, which loads a state dict."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level


def _have_one_shape(values: list[Any]) -> bool:
    """Whether all are tensors that can be stacked; those that cannot are reported where they are loaded."""
    return all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values)


def _replace(state_dict: dict[str, Any], names: _Names, values: Iterable[Tensor | None]) -> None:
    """All that the state dict has of a weight."""
    single = names.weight, names.scales, names.amax
    for name in (*single, *names.many):
        state_dict.pop(name, None)
    state_dict.update({name: value for name, value in zip(single, values, strict=False) if value is not None})
