"""The products of a grouped linear whose operands are quantised, forward and backward, on tensors.

Forward ``y = x W^T`` reads rows of ``x``; ``dx = dy W`` rows of ``dy`` and the transposed bytes of the weight; ``dW =
dy^T x`` columns of both, in blocks of tokens. Each copy is made from what was not quantised. Kernels quantise to e4m3
with scales in float32; for other formats PyTorch does, into the operands of ``formats/operands.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import ArgumentError, RefusedError
from ...fuser.contract import tracing as trace
from ...fuser.replay import capture
from .. import kernels
from ..formats import operands
from ..formats.copies import (
    Columns,
    ColumnValues,
    QuantizedRows,
    Rows,
    RowValues,
    Scaling,
    TransposedValues,
    TransposedWeight,
    WeightOperand,
)
from ..formats.nvfp4 import product_factors
from ..formats.operands import WeightOperands
from ..formats.packed import PackedWeight
from ..formats.recipe import MXFP4, Float8Block, Float8Row, Float8Tensor, NoRecipe, Recipe
from ..formats.schemes import Copy
from ..kernels import Layout, Matrices
from ..kernels.doors.packed import packed_gemm
from ..kernels.doors.quantized import (
    quantize_activation,
    quantize_activation_backward,
    quantize_rows,
    scaled_gemm,
    scaled_wgrad,
    zero_tail,
)
from ..kernels.doors.quantized_whole import quantize_whole_rows, quantize_whole_weight
from ..kernels.doors.scaled_activation import scaled_gemm_activation
from ..kernels.doors.transposition import transpose_bytes
from ..kernels.problems.gemm import nbytes, stacked
from ..values.activation_spec import ActivationSpec
from ..values.switches import active_switches
from . import values as quantized_values


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
    rows: Rows | None
    columns: Columns | None

    @property
    def for_wgrad(self) -> Tensor | Columns | None:
        """What the gradient of a weight reads."""
        return self.values if self.columns is None else self.columns


ROWS_WORTH_A_WEIGHT = 2048
"""Rows a group below which quantising the weight may take longer than faster products save: on an H200, Qwen3's experts
break even with as many, and are slower with 512 (docs/quantised.md, "When it pays")."""


EncodeOf = Callable[[Recipe, Tensor, Tensor], Tensor | None]
"""From rows and their split sizes, what the values of each group are multiplied by, where steps before tell: it is a
step itself. None: nothing has told."""


class GatheredTokens(NamedTuple):
    """Rows of experts that are read where their tokens lie.

    Attributes:
        tokens: [T, K].
        slot_of_row: [R]: the slot, token * top_k + j, of each row.
    """

    tokens: Tensor
    slot_of_row: Tensor
    top_k: int


def check_recipe(op: str, recipe: Any) -> None:
    """Raises :class:`ArgumentError` for what is no recipe."""
    if recipe is not None and not isinstance(recipe, Recipe):
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
    return None if isinstance(recipe, NoRecipe) else recipe


def applied(linear: Any, dtype: torch.dtype) -> Recipe | None:
    """The recipe that the products of a linear follow for rows of this dtype; None: none, and a trace is told why.

    Raises:
        RefusedError: there is one that is not followed, under ``config(strict=True)``.
    """
    of_op = linear.recipe
    recipe: Any = active_switches().recipe if of_op is None else of_op  # in_force, written out
    if recipe is None or type(recipe) is NoRecipe:
        return None
    why = dtype_refusal(recipe, dtype) or refusal(linear, recipe)
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


def dtype_refusal(recipe: Recipe, dtype: torch.dtype) -> str | None:
    """Why rows of this dtype are not quantised; None: they are."""
    is_weight_alone = isinstance(recipe, MXFP4)
    if dtype == torch.bfloat16 or (dtype == torch.float16 and not is_weight_alone):
        return None
    does = "multiplies bfloat16" if is_weight_alone else "quantises bfloat16 or float16"
    return f"{type(recipe).__name__} {does}, not {str(dtype).removeprefix('torch.')}"


def refusal(linear: Any, recipe: Recipe) -> str | None:
    """Why a linear does not follow a recipe, whatever its rows; None: it does."""
    if isinstance(recipe, Float8Tensor) and recipe.delayed is not None and not linear.keeps_scales:
        return "a linear keeps the scales of steps before only for a recipe=Float8Tensor(delayed=...) of its own"
    return operands.format_refusal(recipe, linear.in_features, linear.out_features)


def quantises_activations(recipe: Recipe, is_gradient: bool) -> bool:
    """Whether a kernel may quantise what an activation, or its backward, gives: a block of it is all that it needs."""
    return operands.scaling_of(recipe, is_gradient) is Scaling.BLOCKS


def wgrad_is_quantized(recipe: Recipe) -> bool:
    """Whether weight gradients are products of copies."""
    return getattr(recipe, "wgrad", "float8") == "float8"


def copies_of(
    recipe: Recipe,
    tokens: Tensor | GatheredTokens,
    split_sizes: Tensor,
    *,
    rows: bool,
    wgrad: bool,
    values: bool = False,
    is_gradient: bool = False,
    encode: Tensor | None = None,
) -> TokenCopies:
    """The copies of ``tokens`` [T, K].

    Args:
        tokens: those that are gathered have no values.
        rows: whether a product of rows reads them.
        wgrad: whether the gradient of a weight does.
        values: whether something else reads what was not quantised.
        encode: what the values of each group are multiplied by, where scales come from steps before.
    """
    options: dict[str, Any] = {}
    if isinstance(tokens, GatheredTokens):
        tokens, *gather = tokens
        options = dict(zip(("slot_of_row", "top_k"), gather, strict=True))
    number = options["slot_of_row"].shape[0] if options else tokens.shape[0]
    columns = wgrad and wgrad_is_quantized(recipe)
    kept = tokens if not options and (values or (wgrad and not columns)) else None
    if not rows and not columns:
        return TokenCopies(number, tokens.dtype, kept, None, None)
    if (scaling := operands.scaling_of(recipe, is_gradient)) is not None:
        options |= {"power_of_two": is_power_of_two(recipe), "want_rows": rows, "want_columns": columns}
        if scaling is Scaling.BLOCKS:
            copies = quantize_rows(tokens, split_sizes, **options)
        else:
            copies = quantize_whole_rows(tokens, split_sizes, scaling=scaling, encode=encode, **options)
        return TokenCopies(number, tokens.dtype, kept, copies.rows, copies.columns)
    wanted: dict[str, Any] = {"rows": rows, "columns": columns, "is_gradient": is_gradient}
    if (format := quantized_values.format_of(recipe)) is not None:
        read = quantized_values.of_tokens(recipe, format, tokens, split_sizes, **wanted, **options)
        return TokenCopies(number, tokens.dtype, kept, *read)
    source = tokens.index_select(0, options["slot_of_row"] // options["top_k"]) if options else tokens
    if isinstance(recipe, MXFP4):
        capture.refuse("products of packed weights are not replayed")
        return TokenCopies(number, tokens.dtype, kept, RowValues(source), None)
    capture.refuse(f"PyTorch quantises for {type(recipe).__name__}")
    copied = operands.of_tokens(recipe, source, split_sizes, **wanted, encode=encode)
    names = [name for name in ("rows", "columns") if wanted[name]]
    note_quantiser(recipe, f"rows {'+'.join(names)}", nbytes(source, *(copied.rows or ()), *(copied.columns or ())))
    return TokenCopies(number, tokens.dtype, kept, *copied)


def note_quantiser(recipe: Recipe, copies: str, size: int) -> None:
    """Tells a trace that PyTorch quantises something."""
    if trace.active():
        why = f"no kernels for {type(recipe).__name__}"
        trace.record(trace.KernelCall("torch (quantise)", why, 0, size, f"torch, {copies}, {size / 1e6:.1f} MB"))


def is_power_of_two(recipe: Recipe) -> bool:
    """Whether scales in float32 are powers of two."""
    return getattr(recipe, "scales", None) == "power_of_two"


def product(
    recipe: Recipe,
    rows: Rows,
    weight: WeightOperand | PackedWeight,
    split_sizes: Tensor,
    dtype: torch.dtype,
    **options: Any,
) -> Tensor:
    """``x W^T`` by group, of this dtype; with options of :func:`scaled_gemm`."""
    out = options.pop("out", None)
    options |= {"out_dtype": dtype} if out is None else {"out": out}
    if isinstance(rows, RowValues):
        options["alpha"] = _factors(rows.amax, weight.amax)
        if isinstance(weight, PackedWeight):
            return packed_gemm(rows.data, weight.data, weight.scales, split_sizes, weight.format, **options)
        y = kernels.grouped_gemm(Layout.NT, rows.data, weight.data, split_sizes, **options)
        assert isinstance(y, Tensor)
        return y
    assert isinstance(weight, WeightOperand)
    assert weight.scales is not None
    if isinstance(recipe, Float8Row | Float8Tensor):
        options["fast_accumulation"] = recipe.fast_accumulation
    return scaled_gemm(*rows, weight.data, weight.scales, split_sizes, **options)


def _factors(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """What the product of each group is multiplied by; None: it is right as it is."""
    return None if a is None or b is None else product_factors(a, b)


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
    """The product of two columnwise copies by group, with the keywords of a ``Wgrad``."""
    if isinstance(a, ColumnValues):
        assert isinstance(b, ColumnValues)
        options: dict[str, Any] = {"out": out, "out_dtype": out_dtype, "beta": beta}
        options["alpha"] = _factors(a.amax, b.amax)
        return kernels.grouped_gemm(Layout.TN, a.data, b.data, a.split_sizes, **options)
    assert not isinstance(b, ColumnValues)
    if out is None:
        return scaled_wgrad(*a, *b, split_sizes, rows=rows, out_dtype=out_dtype)
    return scaled_wgrad(*a, *b, split_sizes, rows=rows, out=out, accumulate=beta is not None)


def transposed_operand(recipe: Recipe, weight: Any) -> WeightOperand:
    """What the gradient of rows reads, of what a forward has saved of a weight: the bytes of a copy are transposed now.

    Raises:
        RuntimeError: the memory of the copy has been freed.
    """
    if isinstance(weight, Copy):
        _check_memory(weight.data)
        return operands.turned(recipe, weight, transpose=transpose_bytes)
    operand: WeightOperand = weight.operand if isinstance(weight, TransposedWeight | TransposedValues) else weight
    return operand


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
    """What becomes of a pre-activation: ``act(preact) * scales``, of an activation that may read numbers of columns.

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
    recipe: Recipe, preact: Tensor, split_sizes: Tensor, hidden: HiddenActivation, encode_of: EncodeOf
) -> TokenCopies:
    """Of :func:`hidden_rows`, the copy that a product of rows reads, and no more."""
    postact = hidden_rows(preact, split_sizes, hidden)
    encode = encode_of(recipe, postact, split_sizes)
    return copies_of(recipe, postact, split_sizes, rows=True, wgrad=False, encode=encode)


def activating(
    hidden: HiddenActivation, keep_preact: bool, encode_of: EncodeOf
) -> Callable[..., tuple[Tensor | None, TokenCopies]]:
    """What a linear calls in place of :func:`product`: its result if it is kept, and copies of the activation.

    Args:
        encode_of: of the activation.
    """
    return partial(_activated_product, hidden=hidden, keep_preact=keep_preact, encode_of=encode_of)


def _activated_product(
    recipe: Recipe,
    rows: Rows,
    weight: WeightOperand | PackedWeight,
    split_sizes: Tensor,
    dtype: torch.dtype,
    *,
    hidden: HiddenActivation,
    keep_preact: bool,
    encode_of: EncodeOf,
    **terms: Any,
) -> tuple[Tensor | None, TokenCopies]:
    if not isinstance(recipe, Float8Block):
        preact = product(recipe, rows, weight, split_sizes, dtype, **terms)
        copies = _hidden_copies(recipe, preact, split_sizes, hidden, encode_of)
        return preact if keep_preact else None, copies
    assert isinstance(rows, QuantizedRows)
    assert isinstance(weight, WeightOperand)
    assert weight.scales is not None
    out = scaled_gemm_activation(
        rows.data,
        rows.scales,
        weight.data,
        weight.scales,
        split_sizes,
        hidden.spec,
        scales=hidden.scales,
        power_of_two=is_power_of_two(recipe),
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
    """What a backward through an activation gives: gradients of scales, of the weight behind, and of what is in front.

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
    weight: Any,
    preact: Tensor,
    split_sizes: Tensor,
    hidden: HiddenActivation,
    wanted: Wanted,
    encode_of: EncodeOf,
    hidden_encode: Tensor | None,
) -> ThroughActivation:
    """Through the linear after an activation, and the activation: in one pass unless something reads its values.

    Args:
        weight: as the forward has saved it.
        encode_of: of the gradient of the pre-activation.
        hidden_encode: what the values of the activation have been multiplied by in the forward, if steps before told.
    """
    assert dy.rows is not None
    dpostact = product(recipe, dy.rows, transposed_operand(recipe, weight), split_sizes, dy.dtype)
    if wanted.values or not quantises_activations(recipe, True) or not wgrad_is_quantized(recipe):
        encodes = encode_of, hidden_encode
        return _by_two_passes(recipe, dy, dpostact, preact, split_sizes, hidden, wanted, *encodes)
    out = quantize_activation_backward(
        *(dpostact, preact, split_sizes, hidden.spec),
        scales=hidden.scales,
        power_of_two=is_power_of_two(recipe),
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
    encode_of: EncodeOf,
    hidden_encode: Tensor | None,
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
        *(recipe, grads.preact, split_sizes),
        rows=wanted.inner_rows,
        wgrad=wanted.inner_weight,
        values=wanted.values,
        is_gradient=True,
        encode=encode_of(recipe, grads.preact, split_sizes) if is_read else None,
    )
    if grads.scales is not None:
        zero_tail(grads.scales.unsqueeze(-1), split_sizes)
    through = ThroughActivation(dy, copies, grads.scales, None, grads.vectors)
    if (postact := grads.postact) is None:
        return through
    kept = copies_of(recipe, postact, split_sizes, rows=False, wgrad=True, encode=hidden_encode)
    return through._replace(postact=kept.for_wgrad)


def hidden_for_wgrad(
    recipe: Recipe, preact: Tensor, split_sizes: Tensor, hidden: HiddenActivation, encode: Tensor | None
) -> Tensor | Columns | None:
    """The activation as the gradient of a weight reads it; ``encode`` as of :func:`copies_of`."""
    if not isinstance(recipe, Float8Block) or not wgrad_is_quantized(recipe):
        postact = hidden.rows(preact, split_sizes)
        return copies_of(recipe, postact, split_sizes, rows=False, wgrad=True, encode=encode).for_wgrad
    return quantize_activation(
        *(preact, split_sizes, hidden.spec),
        scales=hidden.scales,
        power_of_two=is_power_of_two(recipe),
        want_rows=False,
        want_columns=True,
        vectors=hidden.vectors,
    ).columns


def weight_operands(recipe: Recipe, weight: Matrices, both: bool, encode: Tensor | None = None) -> WeightOperands:
    """A weight as products read it, quantised with scales of more than blocks: by kernels, or else by PyTorch."""
    if (scaling := operands.scaling_of(recipe, False)) is not None:
        options = {"scaling": scaling, "power_of_two": is_power_of_two(recipe), "both": both, "encode": encode}
        copies = quantize_whole_weight(weight, **options)  # type: ignore[arg-type]
        back = None if copies.transposed is None else WeightOperand(copies.transposed, copies.transposed_scales)
        return WeightOperands(WeightOperand(copies.data, copies.scales), back)
    if (format := quantized_values.format_of(recipe)) is not None:
        return quantized_values.of_weight(format, weight, both)
    capture.refuse(f"PyTorch quantises for {type(recipe).__name__}")
    read = operands.of_weight(recipe, stacked(weight).detach(), both, encode)
    size = nbytes(weight, *read.forward, *(read.backward or ()))
    note_quantiser(recipe, f"weight {'both' if both else 'rows'}", size)
    return read
