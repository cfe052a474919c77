"""The model of most tests, and what a model ran."""

from __future__ import annotations

from typing import Any

from torch import nn

from fusible import GLU, GroupedLinear, Scale, Sequential, SwiGLU


def mlp(
    groups: int = 2,
    features: int = 4,
    hidden: int = 4,
    out_features: int | None = None,
    *,
    act: nn.Module | None = None,
    scaled: bool = True,
    **options: Any,
) -> Sequential:
    """Linear, activation, scales, linear: what becomes one ``GroupedMLP``. Both linears take ``options``."""
    act = act or SwiGLU()
    fc1 = GroupedLinear(groups, features, hidden * (2 if isinstance(act, GLU) else 1), **options)
    fc2 = GroupedLinear(groups, hidden, out_features or features, **options)
    return Sequential(fc1, act, *([Scale()] if scaled else []), fc2)


def steps(model: Sequential, *args: Any, **kwargs: Any) -> list[str]:
    """Names of what a call runs; of the last call if none is described."""
    return [step.name for step in model.explain(*args, **kwargs).steps]
