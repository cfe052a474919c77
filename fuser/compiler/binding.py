"""Binding: which argument of a call goes to which op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, did_you_mean, shown
from .flatten import BindRecipe, FlatContainer, LeafSlots, Target

OpKwargs = Mapping[Any, Mapping[str, Any]]
Given = list[dict[str, Any]]  # leaf -> keyword -> value


class BoundArguments(NamedTuple):
    """A bound call. A tensor that several ops read is one value, so "the same split sizes" can be seen.

    Attributes:
        values: slot -> value; slot 0 is ``x``.
        reads: leaf -> the (keyword, slot) that it was given.
    """

    values: list[Any]
    reads: LeafSlots

    def key(self) -> list[Any]:
        """What a plan may depend on: who reads which value, and what the tensors are like."""
        key: list[Any] = [self.reads]  # itself: the id of one that has gone may come back
        for v in self.values:
            key += (v.dtype, v.device, v.requires_grad, v.layout, v.is_nested) if isinstance(v, Tensor) else (type(v),)
        return key


def bind(
    layout: FlatContainer, x: Tensor, extra: tuple[Any, ...], op_kwargs: OpKwargs | None, shared: dict[str, Any]
) -> BoundArguments:
    """Gives every op its keywords.

    A call whose arguments are all tensors, given as in an earlier call, is bound as that one was.

    Raises:
        ArgumentError: an argument that no op takes, that two ways give, or that is missing.
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
    x: Tensor, extra: tuple[Any, ...], op_kwargs: OpKwargs | None, shared: dict[str, Any]
) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """How the arguments are given and which of them are one tensor; None if not all are tensors. And all of them."""
    form: list[Any] = [len(extra), *shared]
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
    layout: FlatContainer, x: Tensor, extra: tuple[Any, ...], op_kwargs: OpKwargs | None, shared: dict[str, Any]
) -> BoundArguments:
    given: Given = [{} for _ in layout.leaves]
    if op_kwargs is not None:
        _bind_addressed(layout, given, op_kwargs)
    for name, value in shared.items():
        _bind_shared(layout, given, name, value)
    missing = [slot for slot in layout.required if slot[1] not in given[slot[0]]]
    if missing or extra:
        _bind_positional(layout, given, missing, extra)
    return _call(x, given)


def _bind_addressed(layout: FlatContainer, given: Given, op_kwargs: OpKwargs) -> None:
    if not isinstance(op_kwargs, Mapping):
        raise ArgumentError(f"op_kwargs must map ops to their keywords, got a {type(op_kwargs).__name__}")
    addressed: dict[str, Any] = {}
    for key, keywords in op_kwargs.items():
        target = layout.resolve(key)
        if target.label in addressed:
            raise ArgumentError(f"op_kwargs: {_shown(addressed[target.label])} and {_shown(key)} are both {target}")
        addressed[target.label] = key
        if not isinstance(keywords, Mapping):
            raise ArgumentError(f"op_kwargs: {target} got a {type(keywords).__name__}; give a mapping of keywords")
        for name, value in keywords.items():
            _give(layout, given, _leaf_for(layout, target, name), name, value)


def _leaf_for(layout: FlatContainer, target: Target, name: str) -> int:
    """The leaf of a target that takes a keyword: its own, or that of one part of a composite."""
    takers = [leaf for leaf in target.leaves if leaf in layout.takers.get(name, ())]
    if len(takers) == 1:
        return takers[0]
    if takers:
        parts = " and ".join(layout.leaves[leaf].label for leaf in takers)
        raise ArgumentError(f"op_kwargs: {shown(name)} of {target} could be for {parts}; address the part")
    known = sorted({k for leaf in target.leaves for k in getattr(layout.leaves[leaf].op, "keywords", ())})
    raise ArgumentError(f"op_kwargs: {target} takes no {shown(name)}; its keywords are: {', '.join(known) or 'none'}")


def _give(layout: FlatContainer, given: Given, leaf: int, name: str, value: Any) -> None:
    if value is None:
        return
    if (leaf, name) in layout.channels:
        source = layout.leaves[layout.channels[leaf, name][0]]
        raise ArgumentError(
            f"{layout.leaves[leaf]}: {name!r} is the extra output of {source}; it cannot be given as well"
        )
    if name in given[leaf]:
        raise ArgumentError(f"{layout.leaves[leaf]}: {name!r} was given twice")
    given[leaf][name] = value


def _bind_shared(layout: FlatContainer, given: Given, name: str, value: Any) -> None:
    takers = layout.takers.get(name)
    if not takers:
        known = ", ".join(sorted(layout.takers)) or "none"
        hint = did_you_mean(name, layout.takers)
        raise ArgumentError(f"no op takes the keyword {shown(name)}; the keywords of the ops are: {known}{hint}")
    for leaf in takers:
        if name not in given[leaf]:
            _give(layout, given, leaf, name, value)


def _bind_positional(
    layout: FlatContainer, given: Given, missing: list[tuple[int, str]], extra: tuple[Any, ...]
) -> None:
    slots = [(leaf, name) for leaf, name in missing if layout.leaves[leaf].op.keywords[name].tensor]  # type: ignore[union-attr]
    if len(extra) != len(slots):
        raise ArgumentError(_misfit(layout, missing, slots, extra))
    for (leaf, name), value in zip(slots, extra, strict=True):
        given[leaf][name] = value
    if len(slots) < len(missing):
        raise ArgumentError(_misfit(layout, [m for m in missing if m not in slots], [], ()))


def _misfit(
    layout: FlatContainer, missing: list[tuple[int, str]], slots: list[tuple[int, str]], extra: tuple[Any, ...]
) -> str:
    if not extra:
        return "missing: " + "; ".join(f"{layout.leaves[leaf]} needs {name!r}" for leaf, name in missing)
    named = ", ".join(f"{name} of {layout.leaves[leaf]}" for leaf, name in slots) or "none"
    return f"got {len(extra)} extra inputs for {len(slots)} open slots: {named}"


def _call(x: Tensor, given: Given) -> BoundArguments:
    values: list[Any] = [x]
    slots = {id(x): 0}
    reads = []
    for keywords in given:
        row = []
        for name, value in keywords.items():
            slot = slots.get(id(value)) if isinstance(value, (Tensor, list, tuple)) else None
            if slot is None:
                slot = slots[id(value)] = len(values)
                values.append(value)
            row.append((name, slot))
        reads.append(tuple(row))
    return BoundArguments(values, tuple(reads))


def _shown(key: Any) -> str:
    return f"the {type(key).__name__}" if isinstance(key, torch.nn.Module) else shown(key)
