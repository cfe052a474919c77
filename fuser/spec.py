"""What checks know of tensors: everything but their data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .errors import ArgumentError


class Spec(NamedTuple):
    """A tensor without its data: what checks read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout = torch.strided

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        if tensor.is_nested:  # torch may refuse to tell its shape
            return cls((), tensor.dtype, tensor.device, torch.jagged)
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout)


Specs: TypeAlias = Spec | Mapping[str, Spec] | None
"""What a check knows of the outputs: of ``y``, or by name ``{"y": ..., "residual": ...}``; None: nothing."""


def layout_of(tensor: Tensor) -> torch.layout:
    """How it holds its elements; some nested tensors say that they are strided."""
    return torch.jagged if tensor.is_nested else tensor.layout


def check_layout(name: str, layout: torch.layout, taken: Collection[torch.layout]) -> None:
    """Raises :class:`ArgumentError` for a tensor of a layout that an op does not take."""
    if layout not in taken:
        raise not_dense(name, layout)


def not_dense(name: str, layout: torch.layout) -> ArgumentError:
    """The error for a tensor of such a layout, where a dense one is needed."""
    kind = "nested" if layout is torch.jagged else str(layout)
    return ArgumentError(f"{name}: expected a dense tensor, got a {kind} one; give it as a dense tensor")
