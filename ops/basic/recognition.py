"""Recognition of the built-in activation that a program computes, by comparing values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import isfinite

import torch
from torch import Tensor

from ..programs.activations import ACTIVATIONS, value_of
from ..programs.compose import unscaled
from ..programs.program import Program, part_of
from ..programs.tracing import outside_of_modes
from ..values.activation_spec import ActivationSpec

_TOLERANCE = 1e-9
_FARTHEST = 100.0
_MOST_NUMBERS = 10  # a longer function is not a built-in activation


@lru_cache(maxsize=1024)
def recognized(program: Program) -> ActivationSpec | None:
    """The built-in activation with the same values and gradients, with parameters found among the program's numbers."""
    return outside_of_modes(_recognized, program)


def _recognized(program: Program) -> ActivationSpec | None:
    numbers = _numbers(program)
    inputs = _inputs(program, numbers)
    computed = program.run(inputs)
    for spec in _candidates(program, numbers):
        if _close(_value(spec, inputs), computed["y"]) and _agree(unscaled(spec.function).run(inputs), computed):
            return spec
    return None


def _numbers(program: Program) -> list[float]:
    """The numbers in the computation of the value, which may be a limit, slope or offset."""
    lines = part_of(program, ("y",)).lines
    inside = sorted({a for line in lines for a in line.arguments if isinstance(a, float) and isfinite(a)})
    return inside if len(inside) <= _MOST_NUMBERS else []


def _candidates(program: Program, numbers: list[float]) -> Iterator[ActivationSpec]:
    if len(program.arguments) == 1:
        yield from map(ActivationSpec, ACTIVATIONS)
        return
    limits, offsets = [None, *[n for n in numbers if n > 0]], [0.0, *numbers]
    for limit, offset in product(limits, offsets):
        for name in ACTIVATIONS:
            yield ActivationSpec(name, gated=True, limit=limit, linear_offset=offset)
        for alpha in numbers:
            if alpha:
                yield ActivationSpec("silu", gated=True, limit=limit, linear_offset=offset, alpha=alpha)


def _inputs(program: Program, numbers: list[float]) -> dict[str, Tensor]:
    """Test inputs on both sides of the program's numbers, and these themselves; gate and up differ widely."""
    reach = 4.0 * min(max(map(abs, [1.0, *numbers])), _FARTHEST)
    corners = torch.tensor([0.0, *numbers, *[-n for n in numbers]], dtype=torch.float64, device="cpu")
    x = torch.cat([corners, *[torch.linspace(-r, r, 256, dtype=torch.float64, device="cpu") for r in (4.0, reach)]])
    x = torch.cat([x, x])
    apart = torch.arange(len(x), device="cpu") * 37 % len(x)
    return {**dict(zip(program.arguments, (x, x[apart]), strict=False)), "dy": x.cos() + 2.0}


def _value(spec: ActivationSpec, inputs: dict[str, Tensor]) -> Tensor:
    """The value by PyTorch. It rules out most candidates; tracing the programs of all takes seconds."""
    (curve, alpha), arguments = spec.curve, [t for name, t in inputs.items() if name != "dy"]
    return value_of(curve, *arguments, alpha=alpha, limit=spec.limit, linear_offset=spec.linear_offset)


def _agree(outputs: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(_close(value, others[name]) for name, value in outputs.items())


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE)
