"""The part that two fused ops share: a grouped linear, then an activation, times scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads
from .. import kernels
from ..grouped.grouped_linear import GroupedLinear, as_rows, input_grad
from ..quantized.linear import HiddenActivation, activating, applied, hidden_rows
from ..quantized.operands import TokenCopies
from ..values.activation_spec import ActivationSpec
from ..values.checks import product_dtype


@dataclass(frozen=True, eq=False)
class OpPart:
    """A part of a fused op: its role, and for inputs that are no parameters the fused op's name and the part's."""

    role: str
    inputs: tuple[tuple[str, str], ...]


FC1 = OpPart("fc1", (("x", "x"), ("fc1_bias_scale", "bias_scale")))


class FirstLinear(NamedTuple):
    """The result of the forward: the hidden rows [T, F] or their quantised operands, and the state of the backward."""

    postact: Tensor | TokenCopies
    preact: Tensor | None
    saved: GroupedLinear.Saved


def forward(
    fc1: GroupedLinear,
    activation: ActivationSpec,
    x: Tensor,
    split_sizes: Tensor,
    scales: Tensor | None,
    grad_input: Tensor | None,
    bias_scale: Tensor | None,
    needs_grad: frozenset[str],
    autocast_dtype: torch.dtype | None,
    keep_preact: bool,
    tail_unspecified: bool,
    x_is_inner: bool,
    reader: GroupedLinear | None = None,
    vectors: tuple[Tensor, ...] | None = None,
    matrices: tuple[Tensor | None, ...] | None = None,
    arrived: Tensor | None = None,
) -> FirstLinear:
    """``act(x W^T + bias) * scales``; ``needs_grad`` holds the names of ``fc1``, without a role in front.

    Args:
        reader: the second linear, for which hidden rows that follow a recipe are copies; None: they are values.
        arrived: of rows that may come meanwhile: see :class:`fusible.ops.kernels.GroupedGemm`.
    """
    sizes, rows = kernels.as_split_sizes(split_sizes, x.device), as_rows(x, product_dtype(x.dtype, autocast_dtype))
    recipe = applied(fc1, rows.dtype)
    if recipe is not None:
        terms: dict[str, Any] = {"bias": fc1.matrices("bias") if fc1.has_bias else None, "bias_scale": flat(bias_scale)}
        lent, hidden = (bias_scale, grad_input), HiddenActivation(activation, flat(scales), vectors)
        if reader is not None:
            activate = activating(hidden, keep_preact, reader)
            (kept, copies), saved = fc1.quantized_fwd(
                recipe, x, rows, sizes, *lent, needs_grad, x_is_inner, terms, activate
            )
            return FirstLinear(copies, kept, saved)
        preact, saved = fc1.quantized_fwd(recipe, x, rows, sizes, *lent, needs_grad, x_is_inner, terms)
        return FirstLinear(hidden_rows(preact, sizes, hidden), preact if keep_preact else None, saved)
    weight, bias = fc1.matrices("weight", rows.dtype), fc1.matrices("bias") if fc1.has_bias else None
    factors = {"bias": bias, "bias_scale": flat(bias_scale), "scales": flat(scales)}
    kept, postact = kernels.grouped_linear_activation(
        rows,
        weight,
        sizes,
        activation,
        keep_preact=keep_preact,
        tail_unspecified=tail_unspecified,
        vectors=vectors,
        matrices=matrices,
        arrived=arrived,
        **factors,  # type: ignore[arg-type]
    )
    return FirstLinear(postact, kept, fc1.saved(x, rows, weight, sizes, bias_scale, grad_input, needs_grad, x_is_inner))


def backward(
    fc1: GroupedLinear,
    saved: GroupedLinear.Saved,
    dpreact: Tensor | TokenCopies,
    needs_grad: frozenset[str],
    dbias: Tensor | None = None,
    independent: kernels.Independent | None = None,
) -> Grads:
    """The gradients of ``x`` and of everything of ``fc1`` from that of the pre-activation, by names of ``fc1``.

    Args:
        dbias: the gradient of the bias, where it has come with ``dpreact``.
        independent: see :meth:`GroupedLinear.grads_of`.
    """
    if isinstance(dpreact, TokenCopies):
        grads = dict(fc1.grads_of(saved, dpreact, dpreact.values, needs_grad))
    elif saved.recipe is None:
        grads = dict(fc1.grads_of(saved, dpreact, dpreact, needs_grad, independent))
    else:
        grads = dict(fc1.bwd(saved, dpreact, needs_grad=needs_grad))
    if dbias is not None:
        grads["bias"] = dbias
    return {name: gradient for name, gradient in grads.items() if name in needs_grad}


def flat(column: Tensor | None) -> Tensor | None:
    """One number per row, as [T]."""
    return column if column is None or column.dim() == 1 else column.reshape(-1)


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


__all__ = ["FC1", "FirstLinear", "OpPart", "backward", "filed", "flat", "forward", "input_grad", "names_of"]
