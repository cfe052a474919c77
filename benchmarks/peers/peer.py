"""Another library that computes the experts of a layer: its requirements, and how benchmarks call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..contestant import Contestant
from ..problem import Problem

# As transformers' registry takes it: the experts module, tokens, chosen experts, their weights.
ExpertsForward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
HOPPER = (9, 0)


@dataclass(frozen=True)
class Peer:
    """One library. It is imported only to check whether it can run.

    Attributes:
        name: its name in tables and on the command line.
        module: the module that must be importable.
        requirement: the requirements to run it, as a text.
        contestant: the library as a contestant of ``bench mlp``.
        experts_forward: the experts of a transformers model; None if it cannot use weights that a model owns.
        capability: the lowest compute capability.
        dtypes: the supported dtypes of rows and weights.
    """

    name: str
    module: str
    requirement: str
    contestant: Callable[[Problem], Contestant]
    experts_forward: ExpertsForward | None
    capability: tuple[int, int] = HOPPER
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)

    def refusal(self, device: torch.device | str, dtype: torch.dtype) -> str | None:
        """The reason why it cannot take part on a device in a dtype, or None."""
        missing = self.import_error()
        if missing is not None:
            return f"not importable ({missing})"
        if torch.device(device).type != "cuda":
            return "needs a CUDA device"
        if dtype not in self.dtypes:
            return f"does not take {str(dtype).removeprefix('torch.')}"
        actual = torch.cuda.get_device_capability(device)
        return None if actual >= self.capability else f"needs compute capability {_dotted(self.capability)}"

    def import_error(self) -> str | None:
        """The reason why the import fails, in one line.

        A library without its driver or compiler may raise any exception.
        """
        try:
            import_module(self.module)
        except Exception as error:
            return in_one_line(error)
        return None


def in_one_line(error: BaseException) -> str:
    """The first line of an exception's message with its type, or the type alone."""
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    if not lines:
        return name
    return lines[0] if isinstance(error, ImportError) else f"{name}: {lines[0]}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
