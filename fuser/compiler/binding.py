"""Binding of a call's arguments to ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.errors import ArgumentError, did_you_mean, shown
from ..contract.op import Keywords, OpKwargs
from ..contract.stored_values import check_stores_values
from ..runtime.buffers import SlotValues
from .flatten import Addressee, BindRecipe, EntrySlots, FlatContainer, OpEntry

Assignments = list[dict[str, object]]  # entry -> keyword -> value


class BoundArguments(NamedTuple):
    """A bound call. A tensor that several ops read is one value, so "the same split sizes" can be seen.

    Attributes:
        values: slot -> value; slot 0 is ``x``.
        reads: entry -> its (keyword, slot) pairs.
    """

    values: SlotValues
    reads: EntrySlots

    def key(self) -> list[object]:
        """The part of the plan cache key that depends on the call: reads, and types, dtypes and devices of values."""
        key: list[object] = [self.reads]  # itself: the id of one that has gone may come back
        for v in self.values:
            key.append(type(v))
            if isinstance(v, Tensor):
                key += (v.dtype, v.device, v.requires_grad, v.layout, v.is_nested)
        return key

    def check_store_values(self, entries: Sequence[OpEntry]) -> None:
        """Raises if an op would read a tensor whose memory does not hold its values."""
        for i, (entry, reads) in enumerate(zip(entries, self.reads, strict=True)):
            named = {name: self.values[slot] for name, slot in reads}
            if i == 0 and entry.op is not None:
                named["x"] = self.values[0]
            for name, value in named.items():
                if isinstance(value, Tensor):
                    check_stores_values(name, value, str(entry))


def bind(
    layout: FlatContainer, x: object, extra: tuple[object, ...], op_kwargs: OpKwargs | None, shared: Keywords
) -> BoundArguments:
    """Gives every op its keywords.

    A call with only tensor arguments, assigned as in an earlier call, reuses that call's binding.

    Raises:
        ArgumentError: an argument that no op takes, that is given twice, or that is missing.
        IndexError: an int key out of range.
    """
    form, arguments = _form(x, extra, op_kwargs, shared)
    recipe = layout.bound.get(form) if form else None
    if recipe is not None:
        return BoundArguments([arguments[position] for position in recipe.arguments], recipe.reads)
    call = _bind(layout, x, extra, op_kwargs, shared)
    if form is not None:
        position_of = {id(argument): position for position, argument in enumerate(arguments)}
        layout.bound[form] = BindRecipe([position_of[id(value)] for value in call.values], call.reads)
    return call


def _form(
    x: object, extra: tuple[object, ...], op_kwargs: OpKwargs | None, shared: Keywords
) -> tuple[tuple[object, ...] | None, list[object]]:
    """The form of the arguments, with repeated tensors, or None if not all are tensors; and the list of them."""
    form: list[object] = [len(extra) if extra else 0, *shared]
    arguments = [x, *extra, *shared.values()]
    if op_kwargs is not None:
        if not isinstance(op_kwargs, dict):
            return None, arguments
        for key, keywords in op_kwargs.items():
            if not isinstance(keywords, dict):
                return None, arguments
            form += (type(key), key, *keywords)
            arguments += keywords.values()
    for argument in arguments:
        if not isinstance(argument, Tensor):
            return None, arguments
    ids = list(map(id, arguments))
    if len(set(ids)) != len(ids):
        form += map(ids.index, ids)
    return tuple(form), arguments


def _bind(
    layout: FlatContainer, x: object, extra: tuple[object, ...], op_kwargs: OpKwargs | None, shared: Keywords
) -> BoundArguments:
    assignments: Assignments = [{} for _ in layout.entries]
    if op_kwargs is not None:
        _bind_addressed(layout, assignments, op_kwargs)
    for name, value in shared.items():
        _bind_shared(layout, assignments, name, value)
    missing = [slot for slot in layout.required if slot[1] not in assignments[slot[0]]]
    if missing or extra:
        _bind_positional(layout, assignments, missing, extra)
    return _call(x, assignments)


def _bind_addressed(layout: FlatContainer, assignments: Assignments, op_kwargs: OpKwargs) -> None:
    if not isinstance(op_kwargs, Mapping):
        raise ArgumentError(f"op_kwargs must map ops to their keywords, got a {type(op_kwargs).__name__}")
    keys: dict[str, object] = {}
    for key, keywords in op_kwargs.items():
        addressee = layout.resolve(key)
        if addressee.label in keys:
            raise ArgumentError(f"op_kwargs: {_shown(keys[addressee.label])} and {_shown(key)} are both {addressee}")
        keys[addressee.label] = key
        if not isinstance(keywords, Mapping):
            raise ArgumentError(f"op_kwargs: {addressee} got a {type(keywords).__name__}; give a mapping of keywords")
        for name, value in keywords.items():
            _give(layout, assignments, _entry_for(layout, addressee, name), name, value)


def _entry_for(layout: FlatContainer, addressee: Addressee, name: str) -> int:
    """The entry that takes a keyword of an addressee: the op itself, or the only part of a composite that takes it."""
    takers = [entry for entry in addressee.entries if entry in layout.takers.get(name, ())]
    if len(takers) == 1:
        return takers[0]
    if takers:
        parts = " and ".join(layout.entries[entry].label for entry in takers)
        raise ArgumentError(f"op_kwargs: {shown(name)} of {addressee} could be for {parts}; address the part")
    names = {k for entry in addressee.entries for k in getattr(layout.entries[entry].op, "keywords", ())}
    keywords, hint = ", ".join(sorted(names)) or "none", did_you_mean(name, names)
    raise ArgumentError(f"op_kwargs: {addressee} takes no {shown(name)}; its keywords are: {keywords}{hint}")


def _give(layout: FlatContainer, assignments: Assignments, entry: int, name: str, value: object) -> None:
    if value is None:
        return
    if (entry, name) in layout.channels:
        source = layout.entries[layout.channels[entry, name][0]]
        raise ArgumentError(
            f"{layout.entries[entry]}: {name!r} is the extra output of {source}; it cannot be given as well"
        )
    if name in assignments[entry]:
        raise ArgumentError(f"{layout.entries[entry]}: {name!r} was given twice")
    assignments[entry][name] = value


def _bind_shared(layout: FlatContainer, assignments: Assignments, name: str, value: object) -> None:
    takers = layout.takers.get(name)
    if not takers:
        raise layout.refuse_keyword(name)
    for entry in takers:
        if name not in assignments[entry]:
            _give(layout, assignments, entry, name, value)


def _bind_positional(
    layout: FlatContainer, assignments: Assignments, missing: list[tuple[int, str]], extra: tuple[object, ...]
) -> None:
    slots = [(entry, name) for entry, name in missing if layout.entries[entry].op.keywords[name].tensor]  # type: ignore[union-attr]
    if len(extra) != len(slots):
        raise ArgumentError(_misfit(layout, missing, slots, extra))
    for (entry, name), value in zip(slots, extra, strict=True):
        assignments[entry][name] = value
    if len(slots) < len(missing):
        raise ArgumentError(_misfit(layout, [m for m in missing if m not in slots], [], ()))


def _misfit(
    layout: FlatContainer, missing: list[tuple[int, str]], slots: list[tuple[int, str]], extra: tuple[object, ...]
) -> str:
    if not extra:
        return "missing: " + "; ".join(f"{layout.entries[entry]} needs {name!r}" for entry, name in missing)
    named = ", ".join(f"{name} of {layout.entries[entry]}" for entry, name in slots) or "none"
    return f"got {len(extra)} extra inputs for {len(slots)} open slots: {named}"


def _call(x: object, assignments: Assignments) -> BoundArguments:
    values: SlotValues = [x]
    slots = {id(x): 0}
    reads = []
    for keywords in assignments:
        row = []
        for name, value in keywords.items():
            slot = slots.get(id(value)) if isinstance(value, (Tensor, list, tuple)) else None
            if slot is None:
                slot = slots[id(value)] = len(values)
                values.append(value)
            row.append((name, slot))
        reads.append(tuple(row))
    return BoundArguments(values, tuple(reads))


def _shown(key: object) -> str:
    return f"the {type(key).__name__}" if isinstance(key, torch.nn.Module) else shown(key)
