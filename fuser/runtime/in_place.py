"""Non-op modules that write into their input, beside extra outputs that share its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .buffers import NamedValue, overlap


def works_in_place(module: nn.Module) -> bool:
    """Whether the module, or one inside it, has ``inplace`` set, as torch's modules do."""
    return any(getattr(inner, "inplace", False) is True for inner in module.modules())


def run_beside(module: nn.Module, label: str, x: Any, extras: Sequence[NamedValue], values: list[Any]) -> Any:
    """Runs a non-op module on ``x``; extra outputs that are read later keep their values.

    Raises:
        RuntimeError: it has written into memory that one of them shares, but does not have ``inplace`` set.
    """
    shared = [extra.name for extra in extras if overlap(values[extra.slot], x)]
    if not shared:
        return module(x)
    if works_in_place(module):
        return module(x.clone())
    before = None if x.is_inference() else x._version  # tensors of inference mode have none
    y = module(x)
    if before is not None and x._version != before:
        raise RuntimeError(
            f"{label} has modified its input in place, which is also the extra output {shared[0]!r} of an earlier op; "
            "let it write elsewhere, or give it an attribute inplace = True, for which its input is copied"
        )
    return y
