"""The two linears of a fused op as its parts: gradients by the names of each, and what a forward keeps for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...fuser import Gradient, Grads


@dataclass(frozen=True, eq=False)
class OpPart:
    """A part of a fused op: its role, and for inputs that are no parameters the fused op's name and the part's."""

    role: str
    inputs: tuple[tuple[str, str], ...]


FC1 = OpPart("fc1", (("x", "x"), ("fc1_bias_scale", "bias_scale")))
FC2 = OpPart("fc2", (("fc2_bias_scale", "bias_scale"),))


@lru_cache(maxsize=4096)
def names_of(part: OpPart, needs_grad: frozenset[str]) -> frozenset[str]:
    """The gradients that a part must compute: parameters without the role, and other inputs by their
    name in the part.
    """
    prefix = f"{part.role}."
    inside = {name.removeprefix(prefix) for name in needs_grad if name.startswith(prefix)}
    return frozenset(inside | {name for outer, name in part.inputs if outer in needs_grad})


def filed(part: OpPart, grads: Grads) -> dict[str, Gradient]:
    """A part's gradients under the fused op's names; the inverse of :func:`names_of`."""
    return {_outer_name(part, name): gradient for name, gradient in grads.items()}


@lru_cache(maxsize=4096)
def _outer_name(part: OpPart, name: str) -> str:
    return next((outer for outer, inner in part.inputs if inner == name), f"{part.role}.{name}")


@lru_cache(maxsize=4096)
def kept_for_fc1(needs_grad: frozenset[str], has_bias: bool, recompute: bool) -> frozenset[str]:
    """The gradients that decide what is kept of the first linear: all of its gradients, if it is computed again."""
    everything = {"x", "weight", *(["bias_scale"] if has_bias else [])} if recompute else set()
    return names_of(FC1, needs_grad) | everything


@lru_cache(maxsize=4096)
def kept_for_fc2(needs_grad: frozenset[str], has_bias: bool) -> frozenset[str]:
    """The gradients that decide what is kept of the second linear: not its weight's, whose input is computed again."""
    needs = set(names_of(FC2, needs_grad)) | ({"x"} if goes_through(needs_grad) else set())
    needs |= {"bias_scale"} if has_bias and "out_scale_scales" in needs_grad else set()
    return frozenset(needs - {"weight"})


@lru_cache(maxsize=4096)
def reads_preact(needs_grad: frozenset[str]) -> bool:
    """Whether a backward reads the pre-activation; it is computed again where it is not kept."""
    return goes_through(needs_grad) or "fc2.weight" in needs_grad


@lru_cache(maxsize=4096)
def goes_through(needs_grad: frozenset[str]) -> bool:
    """Whether a wanted gradient lies behind the second linear."""
    return any(not name.startswith("fc2") for name in needs_grad)
