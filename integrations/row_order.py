"""The order of gate and up rows in the state dict of a container: noted when it is saved, followed when it is loaded.

``state_dict()`` holds the parameters as they are. Where a GLU reads the rows of a linear interleaved, a note beside the
weight says so; see :mod:`fusible.ops.stored`. What is loaded is brought into the order of the container, and refused
where nothing tells in which it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..fuser import Composite, Sequential
from ..fuser.compiler.flatten import opens
from ..ops import AddExtraInput, ConstantScale, GroupedLinear, Identity, Linear, MakeExtraOutput, Scale
from ..ops.glu import Activated
from ..ops.parameters.stored import SETTLED, SUFFIX, note, noted
from ..ops.quantized.copies import SCALES
from . import layouts

METADATA = "interleaved"
_KEEP_COLUMNS = (AddExtraInput, ConstantScale, Identity, MakeExtraOutput, Scale)


class _Leaf(NamedTuple):
    path: str
    module: nn.Module
    parent: Sequential


class Gated(NamedTuple):
    """A linear whose columns a GLU reads, in blocks or (0) gate before up."""

    path: str
    linear: GroupedLinear | Linear
    block: int
    adjacent: bool  # to the GLU, in one container


def gated_linears(container: Sequential) -> Iterator[Gated]:
    """The linears of a container, and of those nested in it, whose columns a GLU of theirs reads."""
    source: _Leaf | None = None
    previous: _Leaf | None = None
    for leaf in _leaves(container, container, ""):
        module = leaf.module
        if isinstance(module, Activated) and module.spec.gated and source is not None:
            adjacent = previous is source and leaf.parent is source.parent
            assert isinstance(source.module, (GroupedLinear, Linear))
            yield Gated(source.path, source.module, module.spec.block or 0, adjacent)
        if isinstance(module, (GroupedLinear, Linear)):
            source = leaf
        elif not isinstance(module, _KEEP_COLUMNS):
            source = None
        previous = leaf


def _leaves(module: nn.Module, parent: Sequential, prefix: str) -> Iterator[_Leaf]:
    for name, child in module._modules.items():
        if isinstance(child, Composite):
            yield from _leaves(child, parent, f"{prefix}{name}.")
        elif isinstance(child, Sequential) and opens(child):
            yield from _leaves(child, child, f"{prefix}{name}.")
        elif child is not None:
            yield _Leaf(f"{prefix}{name}", child, parent)


def write_notes(container: Sequential, state: dict[str, Any], prefix: str) -> None:
    """Says of each linear whose rows are interleaved, beside its parameters and in the metadata, that they are."""
    blocks = {gated.path: gated.block for gated in gated_linears(container) if gated.block}
    for path, block in blocks.items():
        state[f"{prefix}{path}.{SUFFIX}"] = note(block)
    about = getattr(state, "_metadata", {}).get(prefix[:-1])  # what torch keeps there of the container
    if about is not None:
        about[METADATA] = blocks


def settle(container: Sequential, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> list[str]:
    """Brings the rows of what is loaded into the order in which the container reads them; returns what is wrong."""
    wrong = []
    for gated in gated_linears(container):
        start = f"{prefix}{gated.path}."
        if state.get(start + SUFFIX) is SETTLED or not any(key.startswith(start) for key in state):
            continue
        stored = _stored(gated, state, start, metadata)
        if isinstance(stored, str):
            wrong.append(f"{stored}: say it with {_fix(start)}")
        elif stored != gated.block:
            try:
                _reorder(gated, state, start, stored)
            except RuntimeError:
                wrong.append(f"{start}weight: {stored} does not divide its rows into blocks of gate and up")
            except ValueError as error:
                wrong.append(str(error))
        state[start + SUFFIX] = SETTLED
    return wrong


def _stored(gated: Gated, state: dict[str, Any], start: str, metadata: dict[str, Any]) -> int | str:
    """The block in which a state dict holds the rows of gate and up, or why that is not known."""
    value, block = state.get(start + SUFFIX), noted(state.get(start + SUFFIX))
    if block is not None:
        return block
    if value is not None:
        return f"{start}weight is TransformerEngine's, whose files do not say in which order rows of gate and up are"
    if METADATA in metadata:
        return int(metadata[METADATA].get(gated.path, 0))
    if not gated.block:
        return 0
    if "version" in metadata and gated.adjacent and isinstance(gated.linear, GroupedLinear):
        return 0  # saved before there were notes, when such a container saved gate before up
    return (
        f"{start}weight may have rows of gate and up in blocks of {gated.block}, as they are read here, or gate before "
        "up; the state dict does not say"
    )


def _fix(start: str) -> str:
    return f"fusible.integrations.checkpoints.with_layout(state, {start[:-1]!r}, 'concat' or fusible.interleaved(n))"


def _reorder(gated: Gated, state: dict[str, Any], start: str, stored: int) -> None:
    """From blocks of ``stored`` to those of the container, in every weight, bias and scale of a linear.

    Raises:
        ValueError: rows share scales, which cannot follow them.
    """
    linear = gated.linear
    groups = linear.num_groups if isinstance(linear, GroupedLinear) else 0
    transposed = isinstance(linear, GroupedLinear) and linear.transposed_weight
    scales = state.get(start + SCALES)
    by_row = isinstance(scales, Tensor) and scales.dim() > 1 and scales.shape[1] == linear.out_features
    if isinstance(scales, Tensor) and scales.dim() > 1 and not by_row:
        raise ValueError(f"{start}weight: rows of gate and up are in another order, and share scales")
    for kind in ("weight", "bias", SCALES):
        is_vector = kind == "bias" or (by_row and kind == SCALES and scales.dim() == 2)  # type: ignore[union-attr]
        dim = -1 if is_vector or (kind == "weight" and transposed) else -2
        for key in (f"{start}{kind}", *(f"{start}{kind}{i}" for i in range(groups))):
            tensor = state.get(key)
            if isinstance(tensor, Tensor) and tensor.dim() >= -dim and tensor.shape[dim] == linear.out_features:
                tensor = layouts.deinterleave(tensor, stored, dim) if stored else tensor
                state[key] = layouts.interleave(tensor, gated.block, dim) if gated.block else tensor
