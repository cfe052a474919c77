"""The products of a grouped linear whose operands are quantised, forward and backward, on tensors.

Forward ``y = x W^T`` reads rows of ``x``; ``dx = dy W`` rows of ``dy`` and the transposed bytes of the weight; ``dW =
dy^T x`` columns of both, in blocks of tokens. Each copy is made from what was not quantised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import ArgumentError, RefusedError
from ..fuser import tracing as trace
from ..fuser.config import active_config
from . import kernels
from .activation_spec import ActivationSpec
from .kernels import Matrices
from .kernels.quantized import (
    quantize_activation,
    quantize_activation_backward,
    quantize_rows,
    scaled_gemm,
    scaled_wgrad,
    zero_tail,
)
from .quantized.copies import BlockedColumns, QuantizedRows, QuantizedWeight
from .quantized.recipe import Float8Block, NoRecipe, Recipe


class TokenCopies(NamedTuple):
    """A tensor of tokens as the products of a linear read it; None for what nobody reads.

    Attributes:
        number: of tokens.
        dtype: of what was not quantised.
        values: what was not quantised.
    """

    number: int
    dtype: torch.dtype
    values: Tensor | None
    rows: QuantizedRows | None
    columns: BlockedColumns | None

    @property
    def for_wgrad(self) -> Tensor | BlockedColumns | None:
        """What the gradient of a weight reads."""
        return self.values if self.columns is None else self.columns


class GatheredTokens(NamedTuple):
    """Rows of experts that are read where their tokens lie.

    Attributes:
        tokens: [T, K].
        slot_of_row: [R]: the slot, token * top_k + j, of each row.
    """

    tokens: Tensor
    slot_of_row: Tensor
    top_k: int


class TransposedWeight(NamedTuple):
    """A weight for the gradient of rows.

    Attributes:
        data: e4m3 [E, K, N].
        scales: those of the weight itself, float32 [E, blocks of N, blocks of K].
    """

    data: Tensor
    scales: Tensor


def check_recipe(op: str, recipe: Any) -> None:
    """Raises :class:`ArgumentError` for what is no recipe."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentError(f"{op}: recipe must be one such as fusible.Float8Block(), or None, got {recipe!r}")


def in_force(of_op: Recipe | None) -> Recipe | None:
    """The recipe of an op that has this one of its own, or else of the configuration; None: nothing is quantised."""
    recipe: Any = active_config().recipe if of_op is None else of_op
    return None if isinstance(recipe, NoRecipe) else recipe


def applied(of_op: Recipe | None, dtype: torch.dtype) -> Float8Block | None:
    """The recipe that products of rows of this dtype follow; None: they are not quantised, and a trace is told why.

    Raises:
        RefusedError: there is one that is not followed, under ``config(strict=True)``.
    """
    recipe: Any = active_config().recipe if of_op is None else of_op  # in_force, written out
    if recipe is None or type(recipe) is NoRecipe:
        return None
    why = refusal(recipe, dtype)
    if why is None:
        assert isinstance(recipe, Float8Block)
        return recipe
    if active_config().strict:
        raise RefusedError(f"strict: the linear is not quantised, because {why}")
    trace.note(f"not quantised: {why}")
    return None


def refusal(recipe: Recipe, dtype: torch.dtype) -> str | None:
    """Why products of rows of this dtype do not follow the recipe; None: they do."""
    name = type(recipe).__name__
    if not isinstance(recipe, Float8Block):
        return f"{name} has storage and quantisers, and no grouped linear yet"
    if recipe.gradient != "e4m3":
        return f"{name}(gradient={recipe.gradient!r}) has no products yet"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{name} quantises bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    return None


def copies_of(
    recipe: Float8Block,
    tokens: Tensor | GatheredTokens,
    split_sizes: Tensor,
    *,
    rows: bool,
    wgrad: bool,
    values: bool = False,
) -> TokenCopies:
    """The copies of ``tokens`` [T, K].

    Args:
        tokens: those that are gathered have no values.
        rows: whether a product of rows reads them.
        wgrad: whether the gradient of a weight does.
        values: whether something else reads what was not quantised.
    """
    options: dict[str, Any] = {}
    if isinstance(tokens, GatheredTokens):
        tokens, *gather = tokens
        options = dict(zip(("slot_of_row", "top_k"), gather, strict=True))
    number = options["slot_of_row"].shape[0] if options else tokens.shape[0]
    columns = wgrad and recipe.wgrad == "float8"
    kept = tokens if not options and (values or (wgrad and not columns)) else None
    if not rows and not columns:
        return TokenCopies(number, tokens.dtype, kept, None, None)
    options |= {"power_of_two": is_power_of_two(recipe), "want_rows": rows, "want_columns": columns}
    copies = quantize_rows(tokens, split_sizes, **options)
    return TokenCopies(number, tokens.dtype, kept, copies.rows, copies.columns)


def is_power_of_two(recipe: Float8Block) -> bool:
    """Whether scales are powers of two."""
    return recipe.scales == "power_of_two"


def transposed(weight: QuantizedWeight) -> TransposedWeight | None:
    """What of a weight's copies the gradient of rows reads; None if they are not there."""
    return None if weight.transposed is None else TransposedWeight(weight.transposed, weight.scales)


def turned(weight: QuantizedWeight) -> TransposedWeight:
    """The transposed bytes of a weight that has none, as a pass over it."""
    return TransposedWeight(weight.data.view(torch.uint8).mT.contiguous().view(weight.data.dtype), weight.scales)


def product(
    rows: QuantizedRows, weight: QuantizedWeight, split_sizes: Tensor, dtype: torch.dtype, **options: Any
) -> Tensor:
    """``x W^T`` by group, of this dtype; with options of :func:`scaled_gemm`."""
    out = options.pop("out", None)
    options |= {"out_dtype": dtype} if out is None else {"out": out}
    return scaled_gemm(*rows, weight.data, weight.scales, split_sizes, **options)


def input_grad(
    dy: QuantizedRows, weight: TransposedWeight, split_sizes: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """``dy W`` by group, of this dtype."""
    options: dict[str, Any] = {"out_dtype": dtype} if out is None else {"out": out}
    return scaled_gemm(*dy, weight.data, weight.scales.mT, split_sizes, **options)


def weight_grad(
    a: BlockedColumns,
    b: BlockedColumns,
    split_sizes: Tensor,
    rows: int,
    *,
    out: Matrices | None = None,
    out_dtype: torch.dtype | None = None,
    beta: float | None = None,
) -> Matrices:
    """The product of two columnwise copies by group, with the keywords of a ``Wgrad``."""
    if out is None:
        return scaled_wgrad(*a, *b, split_sizes, rows=rows, out_dtype=out_dtype)
    return scaled_wgrad(*a, *b, split_sizes, rows=rows, out=out, accumulate=beta is not None)


def quantized_hidden(
    recipe: Float8Block,
    preact: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None,
    copied: bool,
) -> Tensor | TokenCopies:
    """``act(preact) * scales``, rounded; ``copied``: the copy that a product of rows reads, and no more."""
    if copied:
        power_of_two = is_power_of_two(recipe)
        copies = quantize_activation(preact, split_sizes, activation, scales=scales, power_of_two=power_of_two)
        return TokenCopies(preact.shape[0], preact.dtype, None, copies.rows, None)
    postact = kernels.activate(preact, activation, scales)
    zero_tail(postact, split_sizes)
    return postact


class ThroughActivation(NamedTuple):
    """The backward of a linear that follows an activation, and of the activation.

    Attributes:
        dy: the gradient of the output.
        preact: that of the pre-activation.
        scales: that of the scales, by row; None: it is not wanted.
        postact: the activation times the scales, as the gradient of the weight reads it; None: it is not wanted.
    """

    dy: TokenCopies
    preact: TokenCopies | None
    scales: Tensor | None
    postact: Tensor | BlockedColumns | None


class Wanted(NamedTuple):
    """What a backward through an activation gives: gradients of scales, of the weight behind, and of what is in front.

    Attributes:
        values: the gradient of the pre-activation, not quantised, which a bias reads.
    """

    scales: bool
    weight: bool
    inner_rows: bool
    inner_weight: bool
    values: bool


def through_activation(
    recipe: Float8Block,
    dy: TokenCopies,
    weight: TransposedWeight,
    preact: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None,
    wanted: Wanted,
) -> ThroughActivation:
    """Through the linear after an activation, and the activation: in one pass unless something reads its values."""
    assert dy.rows is not None
    dpostact = input_grad(dy.rows, weight, split_sizes, dy.dtype)
    if wanted.values or recipe.wgrad != "float8":
        return _by_two_passes(recipe, dy, dpostact, preact, split_sizes, activation, scales, wanted)
    out = quantize_activation_backward(
        *(dpostact, preact, split_sizes, activation),
        scales=scales,
        power_of_two=is_power_of_two(recipe),
        want_rows=wanted.inner_rows,
        want_columns=wanted.inner_weight,
        want_postact=wanted.weight,
        want_scales=wanted.scales,
    )
    copies = TokenCopies(preact.shape[0], preact.dtype, None, out.preact.rows, out.preact.columns)
    return ThroughActivation(dy, copies, out.dscales, out.postact)


def _by_two_passes(
    recipe: Float8Block,
    dy: TokenCopies,
    dpostact: Tensor,
    preact: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None,
    wanted: Wanted,
) -> ThroughActivation:
    grads = kernels.activate_backward(
        dpostact, preact, activation, scales, want_scales=wanted.scales, want_postact=wanted.weight
    )
    copies = copies_of(
        *(recipe, grads.preact, split_sizes),
        rows=wanted.inner_rows,
        wgrad=wanted.inner_weight,
        values=wanted.values,
    )
    if grads.scales is not None:
        zero_tail(grads.scales.unsqueeze(-1), split_sizes)
    postact = grads.postact
    if postact is None:
        return ThroughActivation(dy, copies, grads.scales, None)
    kept = copies_of(recipe, postact, split_sizes, rows=False, wgrad=True)
    return ThroughActivation(dy, copies, grads.scales, kept.for_wgrad)


def hidden_for_wgrad(
    recipe: Float8Block, preact: Tensor, split_sizes: Tensor, activation: ActivationSpec, scales: Tensor | None
) -> Tensor | BlockedColumns | None:
    """``act(preact) * scales`` as the gradient of a weight reads it."""
    if recipe.wgrad != "float8":
        return kernels.activate(preact, activation, scales)
    return quantize_activation(
        *(preact, split_sizes, activation),
        scales=scales,
        power_of_two=is_power_of_two(recipe),
        want_rows=False,
        want_columns=True,
    ).columns
