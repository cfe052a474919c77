"""The order of gate and up rows in the state dict of a container: noted on saving, followed on loading.

``state_dict()`` holds the parameters unchanged. If a GLU reads interleaved columns, a note beside each parameter with
an element or a row per column says so. On loading, rows are brought into the container's order. Loading fails if their
order is unknown or cannot be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...fuser import Composite, Op, Sequential
from ...fuser.compiler.flatten import opens
from ...ops import GroupedLinear
from ...ops.basic.glu import Activated
from ...ops.formats.copies import SCALES
from ...ops.parameters.grouped import ExpertParameters
from ...ops.parameters.stored import SETTLED, SUFFIX, note, noted
from . import layouts

LoadedState = dict[str, Any]
"""Tensors and extra states, by name."""

METADATA = "interleaved"
_KEEP_COLUMNS = (nn.Identity, nn.Dropout)  # modules that are not ops but keep columns apart


class Leaf(NamedTuple):
    """A module that a container runs, and the container that it stands in."""

    path: str
    module: nn.Module
    parent: Sequential


class Gated(NamedTuple):
    """A module with parameters for the columns that a GLU reads, in blocks or (0) gate before up."""

    leaf: Leaf
    block: int
    before_notes: bool  # whether files from before there were notes have its rows gate before up
    obstacle: str | None  # why rows cannot be brought into another order


def gated_modules(container: Sequential) -> Iterator[Gated]:
    """The modules of a container, and of those nested in it, whose output columns a GLU reads."""
    pending: list[tuple[Leaf, str | None]] = []
    previous: Leaf | None = None
    for leaf in leaves(container):
        block = _of_op(leaf.module, "gate_block", None)
        if block is None:
            pending = _with(leaf, pending)
        else:
            yield from (Gated(of, block, _is_pair(of, leaf, previous), why) for of, why in pending)
            pending = []
        previous = leaf


def _with(leaf: Leaf, pending: list[tuple[Leaf, str | None]]) -> list[tuple[Leaf, str | None]]:
    """The modules whose parameters order the columns of ``leaf``, each with the reason why its order is unknown."""
    module = leaf.module
    dims = column_dims(module)
    before = pending if _keeps_columns(module) else []
    if dims:
        others = [name for name, _ in module.named_parameters() if name.rstrip("0123456789") not in dims]
        return [*before, (leaf, f"how the rows of {others[0]} lie is not known" if others else None)]
    if _keeps_columns(module):
        return before
    why = f"how {leaf.path} ({type(module).__name__}) orders its columns is not known"
    if not [*module.parameters(), *module.buffers()]:
        return [(of, why) for of, _ in pending]
    return [] if has_extra_state(module) else [(leaf, why)]


def column_dims(module: nn.Module) -> Mapping[str, int | None]:
    """By parameter name, the dimension (from the end) of the output columns; None if it has no such dimension."""
    dims: Mapping[str, int | None] = _of_op(module, "column_dims", {})
    return {"weight": -2, "bias": -1} if isinstance(module, nn.Linear) else dims


def _of_op(module: nn.Module, name: str, default: object) -> Any:
    """An attribute of an op; the default for other modules, where an attribute of that name means something else."""
    return getattr(module, name, default) if isinstance(module, Op) else default


def _keeps_columns(module: nn.Module) -> bool:
    """Whether each column that comes out is computed from the one that goes in."""
    if isinstance(module, Op):
        return module.promises.passes_x_on or hasattr(type(module), "link")
    return isinstance(module, _KEEP_COLUMNS)


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module has an extra state of its own."""
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _is_pair(source: Leaf, glu: Leaf, previous: Leaf | None) -> bool:
    """Whether a grouped linear and its GLU stand side by side in one container."""
    adjacent = previous is source and glu.parent is source.parent
    return adjacent and isinstance(source.module, GroupedLinear) and isinstance(glu.module, Activated)


def leaves(container: Sequential) -> Iterator[Leaf]:
    """The modules that a container runs, in order; nested containers and composites are opened."""
    return _leaves(container, container, "")


def _leaves(module: nn.Module, parent: Sequential, prefix: str) -> Iterator[Leaf]:
    for name, child in module._modules.items():
        if isinstance(child, Composite):
            yield from _leaves(child, parent, f"{prefix}{name}.")
        elif isinstance(child, Sequential) and opens(child):
            yield from _leaves(child, child, f"{prefix}{name}.")
        elif child is not None:
            yield Leaf(f"{prefix}{name}", child, parent)


def write_notes(container: Sequential, state: LoadedState, prefix: str) -> None:
    """Notes beside each interleaved parameter that it is interleaved, and the order of all in the metadata."""
    blocks = {gated.leaf.path: gated.block for gated in gated_modules(container)}
    for path, block in blocks.items():
        if block:
            state[f"{prefix}{path}.{SUFFIX}"] = note(block)
    about = getattr(state, "_metadata", {}).get(prefix[:-1])  # what torch keeps there of the container
    if about is not None:
        about[METADATA] = blocks


def settle(container: Sequential, state: LoadedState, prefix: str, metadata: LoadedState) -> list[str]:
    """Brings loaded rows of gate and up into the order that the container reads; returns the errors."""
    wrong = []
    for gated in gated_modules(container):
        start = f"{prefix}{gated.leaf.path}."
        key = next((key for key in state if key.startswith(start)), None)
        if key is None or state.get(start + SUFFIX) is SETTLED:
            continue
        stored = _stored(gated, state, start, metadata)
        if isinstance(stored, str):
            wrong.append(f"{stored}: say it with {fix(start)}")
        elif stored != gated.block:
            wrong += _reorder(gated, state, start, stored)
        state[start + SUFFIX] = SETTLED
    return wrong


def _stored(gated: Gated, state: LoadedState, start: str, metadata: LoadedState) -> int | str:
    """The block size of gate and up rows in a state dict, or the reason why it is unknown."""
    value, block = state.get(start + SUFFIX), noted(state.get(start + SUFFIX))
    if block is not None:
        return block
    if value is not None:
        return f"{start}weight is TransformerEngine's, whose files do not say in which order rows of gate and up are"
    if (block := metadata.get(METADATA, {}).get(gated.leaf.path)) is not None:
        return int(block)
    if not gated.block or ("version" in metadata and gated.before_notes):
        return 0
    return untold(f"{start}weight", f"in blocks of {gated.block}, as they are read here")


def untold(name: str, order: str) -> str:
    """The error that the order of a parameter's rows is not stated."""
    return f"{name} may have rows of gate and up {order}, or gate before up; the state dict does not say"


def stated_order(state: Mapping[str, object], linear: str) -> int | None:
    """The block size that a state dict states for the rows of a linear; None if it states none."""
    block = noted(state.get(f"{linear}.{SUFFIX}"))
    names = linear.split(".")
    for depth in range(len(names)) if block is None else ():
        about = getattr(state, "_metadata", {}).get(".".join(names[:depth]), {})
        block = about.get(METADATA, {}).get(".".join(names[depth:]), block)
    return block


def fix(start: str) -> str:
    """The call that states the order of the rows of a linear."""
    return f"fusible.integrations.checkpoints.with_layout(state, {start[:-1]!r}, 'concat' or fusible.interleaved(n))"


def _reorder(gated: Gated, state: LoadedState, start: str, stored: int) -> list[str]:
    """Reorders every tensor with these rows from blocks of ``stored`` to the container's; returns the errors."""
    try:
        if gated.obstacle is not None:
            raise ValueError(
                f"{start[:-1]}: rows of gate and up are {_order(stored)}, and are read here {_order(gated.block)}; "
                f"{gated.obstacle}, so bring them into this order yourself, and say so with {fix(start)}"
            )
        for key, dim in _rows(gated.leaf.module, state, start):
            tensor = layouts.deinterleave(state[key], stored, dim) if stored else state[key]
            state[key] = layouts.interleave(tensor, gated.block, dim) if gated.block else tensor
    except RuntimeError:
        return [f"{start}weight: {stored} does not divide its rows into blocks of gate and up"]
    except ValueError as error:
        return [str(error)]
    return []


def _order(block: int) -> str:
    return f"in blocks of {block}" if block else "gate before up"


def _rows(module: nn.Module, state: LoadedState, start: str) -> Iterable[tuple[str, int]]:
    """The keys of tensors that have the columns of a module, and the dimension in which they have them.

    Raises:
        ValueError: rows share scales, which cannot follow them.
    """
    dims = dict(column_dims(module))
    scales = state.get(start + SCALES)
    if isinstance(module, GroupedLinear) and isinstance(scales, Tensor) and scales.dim() > 1:
        if scales.shape[1] != module.out_features:
            raise ValueError(f"{start}weight: rows of gate and up are in another order, and share scales")
        dims[SCALES] = 1 - scales.dim()
    numbers = ["", *range(module.num_groups)] if isinstance(module, ExpertParameters) else [""]
    for key, dim in [(f"{start}{name}{number}", dim) for name, dim in dims.items() for number in numbers]:
        if dim is not None and isinstance(state.get(key), Tensor) and state[key].dim() >= -dim:
            yield key, dim
