"""What linears understand of a state dict besides their own names, and what it says of the order of their rows.

A linear does not know what reads its columns, so a state dict notes it beside the weight, where torch keeps the extra
state of a module: the size of the blocks in which rows of gate and up alternate, 0 for gate before up.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

SUFFIX = "_extra_state"
SETTLED: Any = object()
"""In place of a note: a container has put the rows into the order in which its GLU reads them."""


def note(block: int) -> Tensor:
    """What a state dict has under :data:`SUFFIX` of a linear: a number on the host, whatever device is the default."""
    return torch.tensor(block, device="cpu")


def noted(value: Any) -> int | None:
    """The block that a note tells; None if the value is none, as the extra state of TransformerEngine's ops."""
    return int(value) if isinstance(value, Tensor) and not value.dim() else None


def drop_note(state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Takes the note of a linear out of what it loads; an error if rows are interleaved, and no container knows why."""
    block = noted(state.pop(f"{prefix}{SUFFIX}", None))
    if block:
        errors.append(
            f"{prefix}weight: rows of gate and up alternate in blocks of {block}, and no GLU of a container reads them "
            "here; load it into the container, or leave the note out"
        )


def take_basic_ops(state: dict[str, Any], prefix: str) -> None:
    """TransformerEngine's ``Linear`` is two ops in a list: their parameters under the names that ours have."""
    if f"{prefix}weight" in state:
        return
    for key in [key for key in state if key.startswith(f"{prefix}basic_ops.")]:
        match = re.fullmatch(r"basic_ops\.\d+\.(weight|bias|_extra_state)", key.removeprefix(prefix))
        if match is not None:
            state.setdefault(f"{prefix}{match[1]}", state.pop(key))
