"""Tensors without their data, as checks, plans, compiled code and explanations know them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .errors import ArgumentError

shape_of: Callable[[Any], torch.Size] = attrgetter("shape")
"""Returns the shape of a tensor. It is written in C, since hot calls map it over their tensors."""


class TensorSpec(NamedTuple):
    """A tensor without its data.

    Attributes:
        shape: None in a plan, which serves any shape.
        layout: a nested tensor counts as ``torch.jagged``.
        requires_grad: unknown for outputs that a check returns.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout = torch.strided
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        if tensor.is_nested:  # torch may refuse to tell its shape
            return cls((), tensor.dtype, tensor.device, torch.jagged, tensor.requires_grad)
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad)

    @classmethod
    def without_shape(cls, tensor: Tensor) -> TensorSpec:
        shape: Any = None
        return cls(shape, tensor.dtype, tensor.device, layout_of(tensor), tensor.requires_grad)

    def empty(self) -> Tensor:
        """A dense tensor like it, uninitialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


Specs: TypeAlias = TensorSpec | Mapping[str, TensorSpec] | None
"""The specs of outputs known to a check: of ``y``, or by name ``{"y": ..., "residual": ...}``; None if unknown."""


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
