"""The products of a grouped linear whose operands are quantised, forward and backward, on tensors.

Forward ``y = x W^T`` reads rows of ``x``; ``dx = dy W`` rows of ``dy`` and the transposed bytes of the weight; ``dW =
dy^T x`` columns of both, in blocks of tokens. Each operand is made from what was not quantised, as
``operands.py`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError, RefusedError
from ...fuser.contract import tracing as trace
from .. import kernels
from ..formats.copies import Columns, Rows, Scaling, Transposition, Weight
from ..formats.formats import product_factors
from ..formats.recipe import Recipe, is_recipe
from ..formats.weight_only import WeightOnly
from ..kernels import Layout, Matrices
from ..kernels.doors.decoding import decode_weight
from ..kernels.doors.packed import packed_gemm
from ..kernels.doors.quantized import (
    quantize_activation,
    quantize_activation_backward,
    scaled_gemm,
    scaled_wgrad,
    zero_tail,
)
from ..kernels.doors.scaled_activation import scaled_gemm_activation
from ..kernels.doors.transposition import transpose_bytes
from ..values.activation_spec import ActivationSpec
from ..values.switches import active_switches
from .operands import TokenCopies, copies_of

ROWS_WORTH_A_WEIGHT = 2048
"""Rows a group below which quantising the weight may take longer than faster products save: on an H200, Qwen3's experts
break even with as many, and are slower with 512 (docs/quantised.md, "When it pays")."""


def check_recipe(op: str, recipe: Any) -> None:
    """Raises :class:`ArgumentError` for what is no recipe."""
    if recipe is not None and not is_recipe(recipe):
        raise ArgumentError(f"{op}: recipe must be one such as fusible.Float8Block(), or None, got {recipe!r}")


def note_few_rows(tokens: TokenCopies, groups: int, device: torch.device) -> None:
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
        return "a linear keeps the scales of steps before only for a recipe=Float8Tensor(delayed=...) of its own"
    return recipe.size_refusal(linear.in_features, linear.out_features)


def quantises_activations(recipe: Recipe, is_gradient: bool) -> bool:
    """Whether a kernel may quantise what an activation, or its backward, gives: a block of it is all that it needs."""
    return recipe.kernels(is_gradient) is Scaling.BLOCKS


def product(
    recipe: Recipe, rows: Rows, weight: Weight, split_sizes: Tensor, dtype: torch.dtype, **options: Any
) -> Tensor:
    """``x W^T`` by group, of this dtype; with options of :func:`scaled_gemm`."""
    out = options.pop("out", None)
    options |= {"out_dtype": dtype} if out is None else {"out": out}
    if rows.scales is not None:
        assert weight.scales is not None
        options["fast_accumulation"] = recipe.fast_accumulation
        return scaled_gemm(rows.data, rows.scales, weight.data, weight.scales, split_sizes, **options)
    options["alpha"] = product_factors(rows.amax, weight.amax)
    if weight.packed is not None:
        assert weight.scales is not None
        return packed_gemm(rows.data, weight.data, weight.scales, split_sizes, weight.packed, **options)
    values = weight.data if weight.scales is None else decoded(recipe, weight, rows.data)
    y = kernels.grouped_gemm(Layout.NT, rows.data, values, split_sizes, **options)
    assert isinstance(y, Tensor)
    return y


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
    beta: float | None = None,
) -> Matrices:
    """The product of columns of two tensors by group, with the keywords of a ``Wgrad``."""
    if a.scales is None or b.scales is None:
        assert a.split_sizes is not None
        options: dict[str, Any] = {"out": out, "out_dtype": out_dtype, "beta": beta}
        options["alpha"] = product_factors(a.amax, b.amax)
        return kernels.grouped_gemm(Layout.TN, a.data, b.data, a.split_sizes, **options)
    operands = a.data, a.scales, b.data, b.scales
    if out is None:
        return scaled_wgrad(*operands, split_sizes, rows=rows, out_dtype=out_dtype)
    return scaled_wgrad(*operands, split_sizes, rows=rows, out=out, accumulate=beta is not None)


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


class HiddenActivation(NamedTuple):
    """The hidden rows of a pre-activation, ``act(preact) * scales``; the activation may read numbers of columns.

    Attributes:
        scales: [T]; None for ones.
        vectors: the numbers of columns: see :class:`fusible.ops.kernels.problems.gemm.Activate`.
    """

    spec: ActivationSpec
    scales: Tensor | None = None
    vectors: kernels.Operands = None

    def of_groups(self, split_sizes: Tensor) -> tuple[kernels.Operands, Tensor | None]:
        """The numbers of columns, and the rows of each group, which nothing reads without them."""
        return self.vectors, None if self.vectors is None else split_sizes

    def rows(self, preact: Tensor, split_sizes: Tensor) -> Tensor:
        """Its values, rounded."""
        return kernels.activate(preact, self.spec, self.scales, *self.of_groups(split_sizes))


def hidden_rows(preact: Tensor, split_sizes: Tensor, hidden: HiddenActivation) -> Tensor:
    """The activation's values, rounded; zero in the tail."""
    postact = hidden.rows(preact, split_sizes)
    zero_tail(postact, split_sizes)
    return postact


def _hidden_copies(
    recipe: Recipe, preact: Tensor, split_sizes: Tensor, hidden: HiddenActivation, reader: nn.Module
) -> TokenCopies:
    """The operand of rows that a linear reads of :func:`hidden_rows`; its forward reads nothing else."""
    postact = hidden_rows(preact, split_sizes, hidden)
    recipe = recipe.on(reader, "x", postact, split_sizes)
    return copies_of(recipe, postact, split_sizes, rows=True, wgrad=False)


def activating(
    hidden: HiddenActivation, keep_preact: bool, reader: nn.Module
) -> Callable[..., tuple[Tensor | None, TokenCopies]]:
    """The function that replaces :func:`product`: it returns the result, if kept, and operands of the activation.

    Args:
        reader: the linear that reads the activation.
    """
    return partial(_activated_product, hidden=hidden, keep_preact=keep_preact, reader=reader)


def _activated_product(
    recipe: Recipe,
    rows: Rows,
    weight: Weight,
    split_sizes: Tensor,
    dtype: torch.dtype,
    *,
    hidden: HiddenActivation,
    keep_preact: bool,
    reader: nn.Module,
    **terms: Any,
) -> tuple[Tensor | None, TokenCopies]:
    if not quantises_activations(recipe, False):
        preact = product(recipe, rows, weight, split_sizes, dtype, **terms)
        copies = _hidden_copies(recipe, preact, split_sizes, hidden, reader)
        return preact if keep_preact else None, copies
    assert rows.scales is not None
    assert weight.scales is not None
    out = scaled_gemm_activation(
        rows.data,
        rows.scales,
        weight.data,
        weight.scales,
        split_sizes,
        hidden.spec,
        scales=hidden.scales,
        power_of_two=recipe.is_power_of_two,
        keep_preact=keep_preact,
        dtype=dtype,
        vectors=hidden.vectors,
        **terms,
    )
    return out.preact, TokenCopies(out.row_data.shape[0], dtype, None, out.rows, None)


class ThroughActivation(NamedTuple):
    """The backward of a linear that follows an activation, and of the activation.

    Attributes:
        dy: the gradient of the output.
        preact: that of the pre-activation.
        scales: that of the scales, by row; None: it is not wanted.
        postact: the activation times the scales, as the gradient of the weight reads it; None: it is not wanted.
        vectors: the gradients of the numbers of columns; None: they are not wanted.
    """

    dy: TokenCopies
    preact: TokenCopies | None
    scales: Tensor | None
    postact: Tensor | Columns | None
    vectors: kernels.Operands = None


class Wanted(NamedTuple):
    """The gradients that a backward through an activation gives: of scales, the weight behind, and the rows in front.

    Attributes:
        values: the gradient of the pre-activation, not quantised, which a bias reads.
        vectors: those of numbers of columns.
    """

    scales: bool
    weight: bool
    inner_rows: bool
    inner_weight: bool
    values: bool
    vectors: bool


def through_activation(
    recipe: Recipe,
    dy: TokenCopies,
    weight: Weight,
    preact: Tensor,
    split_sizes: Tensor,
    hidden: HiddenActivation,
    wanted: Wanted,
    front: nn.Module,
    hidden_scales: Tensor | None,
) -> ThroughActivation:
    """Through the linear after an activation, and the activation: in one pass unless something reads its values.

    Args:
        weight: as the forward has saved it.
        front: the linear before the activation, which reads the gradient of the pre-activation.
        hidden_scales: those of the activation in the forward, where they came from steps before.
    """
    assert dy.rows is not None
    dpostact = product(recipe, dy.rows, transposed_operand(recipe, weight), split_sizes, dy.dtype)
    if wanted.values or not quantises_activations(recipe, True) or not recipe.quantises_wgrad:
        linears = front, hidden_scales
        return _by_two_passes(recipe, dy, dpostact, preact, split_sizes, hidden, wanted, *linears)
    out = quantize_activation_backward(
        *(dpostact, preact, split_sizes, hidden.spec),
        scales=hidden.scales,
        power_of_two=recipe.is_power_of_two,
        want_rows=wanted.inner_rows,
        want_columns=wanted.inner_weight,
        want_postact=wanted.weight,
        want_scales=wanted.scales,
        vectors=hidden.vectors,
        want_vectors=wanted.vectors,
    )
    copies = TokenCopies(preact.shape[0], preact.dtype, None, out.preact.rows, out.preact.columns)
    return ThroughActivation(dy, copies, out.dscales, out.postact, out.dvectors)


def _by_two_passes(
    recipe: Recipe,
    dy: TokenCopies,
    dpostact: Tensor,
    preact: Tensor,
    split_sizes: Tensor,
    hidden: HiddenActivation,
    wanted: Wanted,
    front: nn.Module,
    hidden_scales: Tensor | None,
) -> ThroughActivation:
    vectors, sizes = hidden.of_groups(split_sizes)
    grads = kernels.activate_backward(
        *(dpostact, preact, hidden.spec, hidden.scales),
        want_scales=wanted.scales,
        want_postact=wanted.weight,
        vectors=vectors,
        split_sizes=sizes,
        want_vectors=wanted.vectors,
    )
    is_read = wanted.inner_rows or wanted.inner_weight or wanted.values
    copies = copies_of(
        *(recipe.on(front, "gradient", grads.preact, split_sizes) if is_read else recipe, grads.preact, split_sizes),
        rows=wanted.inner_rows,
        wgrad=wanted.inner_weight,
        values=wanted.values,
        is_gradient=True,
    )
    if grads.scales is not None:
        zero_tail(grads.scales.unsqueeze(-1), split_sizes)
    through = ThroughActivation(dy, copies, grads.scales, None, grads.vectors)
    if (postact := grads.postact) is None:
        return through
    kept = copies_of(recipe.with_scales(hidden_scales), postact, split_sizes, rows=False, wgrad=True)
    return through._replace(postact=kept.for_wgrad)


def hidden_for_wgrad(
    recipe: Recipe, preact: Tensor, split_sizes: Tensor, hidden: HiddenActivation, hidden_scales: Tensor | None
) -> Tensor | Columns | None:
    """The activation as the gradient of a weight reads it; ``hidden_scales`` as of :func:`through_activation`."""
    if not quantises_activations(recipe, False) or not recipe.quantises_wgrad:
        postact, recipe = hidden.rows(preact, split_sizes), recipe.with_scales(hidden_scales)
        return copies_of(recipe, postact, split_sizes, rows=False, wgrad=True).for_wgrad
    return quantize_activation(
        *(preact, split_sizes, hidden.spec),
        scales=hidden.scales,
        power_of_two=recipe.is_power_of_two,
        want_rows=False,
        want_columns=True,
        vectors=hidden.vectors,
    ).columns
