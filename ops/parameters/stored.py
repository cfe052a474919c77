"""Foreign names that linears read from a state dict, and its note on the order of their rows.

A linear does not know the op that reads its columns. The state dict therefore notes beside the weight, in the module's
extra state, the size of the blocks in which rows of gate and up alternate; 0 for gate before up.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

SUFFIX = "_extra_state"
SETTLED = object()
"""In place of a note: a container has put the rows into the order in which its GLU reads them."""


def note(block: int) -> Tensor:
    """The note in a state dict under :data:`SUFFIX` of a linear: a number on the CPU, whatever the default device."""
    return torch.tensor(block, device="cpu")


def noted(value: object) -> int | None:
    """The block size in a note; None for other values, such as the extra state of TransformerEngine's ops."""
    return int(value) if isinstance(value, Tensor) and not value.dim() else None


def drop_note(state: dict[str, object], prefix: str, errors: list[str]) -> None:
    """Removes the note of a linear from a state dict; adds an error if rows alternate and no container reads them."""
    block = noted(state.pop(f"{prefix}{SUFFIX}", None))
    if block:
        errors.append(
            f"{prefix}weight: rows of gate and up alternate in blocks of {block}, and no GLU of a container reads them "
            "here; load it into the container, or leave the note out"
        )


def take_basic_ops(state: dict[str, object], prefix: str) -> None:
    """Renames the parameters of TransformerEngine's ``Linear``, a list of two ops, to ours."""
    if f"{prefix}weight" in state:
        return
    for key in [key for key in state if key.startswith(f"{prefix}basic_ops.")]:
        match = re.fullmatch(r"basic_ops\.\d+\.(weight|bias|_extra_state)", key.removeprefix(prefix))
        if match is not None:
            state.setdefault(f"{prefix}{match[1]}", state.pop(key))
