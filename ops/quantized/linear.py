"""The products of a grouped linear, forward and backward, on tensors in 16 bits or more, or quantised.

Forward ``y = x W^T`` reads rows of ``x``; ``dx = dy W`` rows of ``dy`` and the transposed bytes of the weight; ``dW =
dy^T x`` columns of both, in blocks of tokens. Each operand is made from what was not quantised, as
``operands.py`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...fuser import ArgumentError, RefusedError
from ...fuser.contract import tracing as trace
from .. import kernels
from ..formats.copies import Columns, Rows, Transposition, Weight
from ..formats.formats import product_factors
from ..formats.recipe import Recipe, is_recipe
from ..formats.weight_only import WeightOnly, part_of
from ..kernels import NO_TERMS, Layout, Matrices, Terms
from ..kernels.doors.decoding import decode_weight, decoding_runs, multiply_runs
from ..kernels.doors.gathered_wgrad import gathered_wgrad
from ..kernels.doors.packed import packed_gemm
from ..kernels.doors.quantized import ScaledSums, scaled_gemm, scaled_wgrad
from ..kernels.doors.stored import decodes_within, stored_product
from ..kernels.doors.transposition import transpose_bytes
from ..values.switches import active_switches
from .operands import GatheredTokens, Tokens

WgradOperand = Tensor | GatheredTokens | Columns
ROWS_WORTH_A_WEIGHT = 2048
"""Rows a group below which quantising the weight may take longer than faster products save: on an H200, Qwen3's experts
break even with as many, and are slower with 512 (docs/quantised.md, "When it pays")."""


def check_recipe(op: str, recipe: Any) -> None:
    """Raises :class:`ArgumentError` if ``recipe`` is not a recipe."""
    if recipe is not None and not is_recipe(recipe):
        raise ArgumentError(f"{op}: recipe must be one such as fusible.Float8Block(), or None, got {recipe!r}")


def note_few_rows(tokens: Tokens, groups: int, device: torch.device) -> None:
    """Tells a trace where a weight is quantised for so few rows that 16 bits may be faster."""
    if not trace.active() or device.type == "cpu" or active_switches().same_weights:
        return
    rows = tokens.number // groups
    if rows < ROWS_WORTH_A_WEIGHT:
        trace.note(
            f"the weight is quantised at every call, for {rows} rows a group on average: below {ROWS_WORTH_A_WEIGHT}, "
            "16 bits may be faster; same_weights() quantises once for many calls"
        )


def in_force(of_op: Recipe | None) -> Recipe | None:
    """The recipe of an op that has this one of its own, or else of the configuration; None: nothing is quantised."""
    recipe: Any = active_switches().recipe if of_op is None else of_op
    return recipe if recipe is not None and recipe.quantises else None


def applied(linear: Any, dtype: torch.dtype) -> Recipe | None:
    """The recipe that the products of a linear follow for rows of this dtype; None: none, and a trace is told why.

    Raises:
        RefusedError: there is one that is not followed, under ``config(strict=True)``.
    """
    of_op = linear.recipe
    recipe: Any = active_switches().recipe if of_op is None else of_op  # in_force, written out
    if recipe is None or not recipe.quantises:
        return None
    why = recipe.dtype_refusal(dtype) or refusal(linear, recipe)
    if why is None:
        followed: Recipe = recipe
        return followed
    if active_switches().strict:
        raise RefusedError(f"strict: the linear is not quantised, because {why}")
    trace.note(f"not quantised: {why}")
    return None


def followed_by(linear: Any) -> Recipe | None:
    """The recipe that the products of a linear follow for rows of a dtype that is quantised."""
    recipe = in_force(linear.recipe)
    return None if recipe is None or refusal(linear, recipe) is not None else recipe


def refusal(linear: Any, recipe: Recipe) -> str | None:
    """Why a linear does not follow a recipe, whatever its rows; None: it does."""
    if recipe.steps is not None and not linear.keeps_scales:
        return "a linear keeps scales of earlier steps only with its own recipe=Float8Tensor(delayed=...)"
    return recipe.size_refusal(linear.in_features, linear.out_features)


def multiplied(
    x: Tokens, weight: Matrices | Weight, split_sizes: Tensor, terms: Terms, out: Tensor | None = None
) -> Tensor:
    """``x W^T`` by group, with these terms. A second pair's product is computed from unquantised rows, and added."""
    if x.recipe is None:
        return kernels.grouped_gemm(Layout.NT, x.values, weight, split_sizes, out=out, terms=terms)  # type: ignore
    assert x.rows is not None
    assert isinstance(weight, Weight)
    y = product(x.recipe, x.rows, weight, split_sizes, x.dtype, terms._replace(second=None, slots=None), out=out)
    y = _with_second(y, terms, Layout.NT, split_sizes)
    if terms.slots is not None:
        kernels.send_rows(y, terms.slots)
    return y


def multiplied_back(
    dy: Tokens,
    weight: Matrices | Weight,
    split_sizes: Tensor,
    out: Tensor | None = None,
    independent: kernels.Independent | None = None,
    terms: Terms = NO_TERMS,
) -> Tensor:
    """``dy W`` by group, of a weight as the forward has saved it; a second pair as for :func:`multiplied`."""
    if dy.recipe is None:
        options: dict[str, Any] = {"out": out, "independent": independent, "terms": terms}
        return kernels.grouped_gemm(Layout.NN, dy.values, weight, split_sizes, **options)  # type: ignore
    assert dy.rows is not None
    assert isinstance(weight, Weight)
    dx = product(dy.recipe, dy.rows, transposed_operand(dy.recipe, weight), split_sizes, dy.dtype, out=out)
    return _with_second(dx, terms, Layout.NN, split_sizes)


def _with_second(rows: Tensor, terms: Terms, layout: Layout, split_sizes: Tensor) -> Tensor:
    """Adds the product of the second pair, if there is one, which reads unquantised rows."""
    if terms.second is None:
        return rows
    return kernels.grouped_gemm(layout, *terms.second, split_sizes, out=rows, terms=kernels.ADDED)  # type: ignore[return-value]


def product(
    recipe: Recipe,
    rows: Rows,
    weight: Weight,
    split_sizes: Tensor,
    dtype: torch.dtype,
    terms: Terms = NO_TERMS,
    *,
    parts: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """``x W^T`` by group, of this dtype; ``parts``: the halves of :class:`ScaledGemm`."""
    options: dict[str, Any] = {"out_dtype": dtype} if out is None else {"out": out}
    if rows.scales is not None:
        assert weight.scales is not None
        options |= {"sums": ScaledSums(parts, recipe.fast_accumulation), "terms": terms}
        return scaled_gemm(rows.data, rows.scales, weight.data, weight.scales, split_sizes, **options)
    alpha = product_factors(rows.amax, weight.amax)
    if weight.packed is not None:
        assert weight.scales is not None
        return packed_gemm(
            rows.data, weight.data, weight.scales, split_sizes, weight.packed, alpha=alpha, terms=terms, **options
        )
    terms = terms._replace(alpha=alpha)
    if weight.scales is not None:
        return decoded_product(Layout.NT, rows.data, recipe, weight, split_sizes, terms=terms, **options)
    y = kernels.grouped_gemm(Layout.NT, rows.data, weight.data, split_sizes, terms=terms, **options)
    assert isinstance(y, Tensor)
    return y


def wgrad_of(a: WgradOperand, b: WgradOperand, split_sizes: Tensor, number: int) -> Callable[..., Matrices]:
    """``a^T b`` by group, as a function of the keywords of a ``Wgrad``.

    Args:
        number: of tokens, which quantised operands do not tell.
    """
    if isinstance(a, GatheredTokens):
        return partial(gathered_wgrad, a.tokens, b, a.routing, True)  # type: ignore[arg-type]
    if isinstance(b, GatheredTokens):
        return partial(gathered_wgrad, b.tokens, a, b.routing, False)  # type: ignore[arg-type]
    if isinstance(a, Columns):
        return partial(weight_grad, a, b, split_sizes, number)  # type: ignore[arg-type]
    return partial(kernels.grouped_gemm, Layout.TN, a, b, split_sizes)  # type: ignore[arg-type]


def values_of(weight: Matrices | Weight | None, recipe: Recipe | None, like: Tensor) -> Matrices:
    """The weight [E, N, K] for a product with such rows, decoded if it is stored in a weight-only format."""
    assert weight is not None
    if not isinstance(weight, Weight):
        return weight
    assert recipe is not None
    return decoded(recipe, weight, like)


def multiplies_apart(weight: Matrices | Weight | None, recipe: Recipe | None, like: Tensor, rank: int = 0) -> bool:
    """Whether products of a weight with such rows end without an epilogue: of its bytes, or of several runs.

    Args:
        rank: the depth of the second pair of operands.
    """
    if not isinstance(weight, Weight):
        return False
    if not isinstance(recipe, WeightOnly) or decodes_within(like, weight, recipe, rank):
        return True
    return len(decoding_runs(weight.data, recipe.values_in_byte, like)) > 1


def weight_product(
    layout: Layout,
    rows: Tensor,
    weight: Matrices | Weight | None,
    recipe: Recipe | None,
    split_sizes: Tensor,
    terms: Terms,
) -> Tensor:
    """The product of rows and a weight as it is, or decoded for it."""
    assert weight is not None
    if isinstance(weight, Weight):
        assert recipe is not None
        return decoded_product(layout, rows, recipe, weight, split_sizes, terms=terms)
    y = kernels.grouped_gemm(layout, rows, weight, split_sizes, terms=terms)
    assert isinstance(y, Tensor)
    return y


def decoded_product(
    layout: Layout, rows: Tensor, recipe: Recipe, weight: Weight, split_sizes: Tensor, **options: Any
) -> Tensor:
    """The product of rows and a weight that is decoded within it, or before it as :func:`multiply_runs` does."""
    terms: Terms = options.get("terms", NO_TERMS)
    rank = 0 if terms.second is None else terms.second.a.shape[1]
    if _gives_rows(rows, terms, options) and decodes_within(rows, weight, recipe, rank):
        return stored_product(layout, rows, weight, split_sizes, terms, options.get("out"))
    runs = decoding_runs(weight.data, recipe.values_in_byte, rows)
    return multiply_runs(
        *(runs, lambda run: decoded(recipe, part_of(weight, run), rows), layout, rows, split_sizes), **options
    )


def _gives_rows(rows: Tensor, terms: Terms, options: dict[str, Any]) -> bool:
    """Whether a product alone is wanted, in the dtype of the rows."""
    extras = terms.alpha, terms.beta, terms.slots
    return all([extra is None for extra in extras]) and options.get("out_dtype", rows.dtype) == rows.dtype


def decoded(recipe: Recipe, weight: Weight, like: Tensor) -> Tensor:
    """The values of a weight that is kept in 8 or 4 bits and multiplied in 16: [E, N, K], or [E, K, N] if it is turned.

    Args:
        like: a tensor of the product; the values have its dtype.
    """
    assert isinstance(recipe, WeightOnly)
    assert weight.scales is not None
    values = decode_weight(weight.data, weight.scales, weight.amax, like, recipe)
    return values if weight.turn is Transposition.NOTHING else values.mT


def weight_grad(
    a: Columns,
    b: Columns,
    split_sizes: Tensor,
    rows: int,
    *,
    out: Matrices | None = None,
    out_dtype: torch.dtype | None = None,
    terms: Terms = NO_TERMS,
) -> Matrices:
    """The product of columns of two tensors by group, with the keywords of a ``Wgrad``."""
    if a.scales is None or b.scales is None:
        assert a.split_sizes is not None
        terms = terms._replace(alpha=product_factors(a.amax, b.amax))
        into: dict[str, Any] = {"out": out, "out_dtype": out_dtype}
        return kernels.grouped_gemm(Layout.TN, a.data, b.data, a.split_sizes, **into, terms=terms)
    operands = a.data, a.scales, b.data, b.scales
    if out is None:
        return scaled_wgrad(*operands, split_sizes, rows=rows, out_dtype=out_dtype)
    return scaled_wgrad(*operands, split_sizes, rows=rows, out=out, accumulate=terms.beta is not None)


def transposed_operand(recipe: Recipe, weight: Weight) -> Weight:
    """The operand of the gradient of rows, from a weight that a forward has kept; transposes bytes of a copy.

    Raises:
        RuntimeError: the memory of the copy has been freed.
    """
    if weight.turn is not Transposition.COPY:
        return weight.viewed()
    _check_memory(weight.data)
    return recipe.turned(weight, transpose=transpose_bytes)


def _check_memory(data: Tensor) -> None:
    """FSDP2 resizes storages to nothing, and a kernel would read at address 0."""
    if trace.has_no_data(data) or not data.numel() or data.untyped_storage().nbytes():
        return
    raise RuntimeError(
        "GroupedLinear: weight: FSDP2 gathered it for the forward, has freed it since, and has not gathered it again "
        "for the backward; call the module that was sharded, let it return tensors, alone or in lists, tuples or "
        "dicts, and leave set_unshard_in_backward(True)"
    )
