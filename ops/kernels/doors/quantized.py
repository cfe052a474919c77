"""The door to quantisers and to products of quantised operands: allocates, chooses a backend, says why, runs it.

Every function takes split sizes as a tensor on the device of the rows. Arguments have been checked. Scales are decode
scales: a value is its byte times its scale. Where our own quantisers do not take an activation, it runs as a kernel of
its own, whose result is quantised: the bytes are the same, since an activation is rounded before it is quantised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....fuser.contract import tracing as trace
from ....fuser.replay import capture
from ...formats.copies import BLOCK, Columns, Rows, ceil_blocks
from ...values.activation_spec import ActivationSpec
from .. import activate, activate_backward, products
from ..dispatch import choose, run, solve
from ..operators.custom_ops import kernel
from ..operators.outputs import like_operands
from ..problems.gemm import NO_TERMS, Matrices, Operands, Terms, first
from ..problems.quantized import (
    Multiplying,
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizedWeight,
    QuantizeRows,
    QuantizeWeight,
    ScaledGemm,
    ScaledWgrad,
)
from . import dequantized

E4M3 = torch.float8_e4m3fn


class RowCopies(NamedTuple):
    """The operands of a tensor of tokens, without unwanted ones; flat, as a custom op returns them."""

    row_data: Tensor | None
    row_scales: Tensor | None
    column_data: Tensor | None
    column_scales: Tensor | None

    @property
    def rows(self) -> Rows | None:
        if self.row_data is None or self.row_scales is None:
            return None
        return Rows(self.row_data, self.row_scales)

    @property
    def columns(self) -> Columns | None:
        if self.column_data is None or self.column_scales is None:
            return None
        return Columns(self.column_data, self.column_scales)


class WantedCopies(NamedTuple):
    """The results that are wanted of a backward through an activation."""

    want_rows: bool
    want_columns: bool
    want_postact: bool
    want_scales: bool


class ScaledSums(NamedTuple):
    """How the products of blocks become those of rows.

    Attributes:
        halves: of the rows of a weight, see :class:`ScaledGemm`.
        fast_accumulation: sums need not be promoted, where scales are of whole rows.
    """

    halves: int = 1
    fast_accumulation: bool = False


EXACT_SUMS = ScaledSums()


class BackwardCopies(NamedTuple):
    """The copies of the gradient of a pre-activation and of the activation; and the gradients of scales and vectors."""

    row_data: Tensor | None
    row_scales: Tensor | None
    column_data: Tensor | None
    column_scales: Tensor | None
    postact_data: Tensor | None
    postact_scales: Tensor | None
    dscales: Tensor | None
    dvectors: Operands = None

    @property
    def preact(self) -> RowCopies:
        return RowCopies(*self[:4])

    @property
    def postact(self) -> Columns | None:
        if self.postact_data is None or self.postact_scales is None:
            return None
        return Columns(self.postact_data, self.postact_scales)


def new_copies(
    x: Tensor,
    split_sizes: Tensor,
    want_rows: bool,
    want_columns: bool,
    slot_of_row: Tensor | None = None,
    columns: int | None = None,
    has_whole_rows: bool = False,
) -> RowCopies:
    """Memory for the wanted copies of rows like ``x``, or of as many as there are slots.

    Args:
        columns: the columns of a row, if not those of ``x``.
        has_whole_rows: whether a scale belongs to a whole row, not to a block.
    """
    rows, columns = x.shape[0] if slot_of_row is None else slot_of_row.shape[0], columns or x.shape[1]
    number = rows // BLOCK + split_sizes.shape[0]
    by_row: tuple[Tensor | None, ...] = (None, None)
    by_column: tuple[Tensor | None, ...] = (None, None)
    if want_rows:
        shape = (rows,) if has_whole_rows else (ceil_blocks(columns), (rows + 3) // 4 * 4)
        scales = x.new_empty(shape, dtype=torch.float32)
        by_row = x.new_empty((rows, columns), dtype=E4M3), scales
    if want_columns:
        scales = x.new_empty((number, columns), dtype=torch.float32)
        by_column = x.new_empty((number, columns, BLOCK), dtype=E4M3), scales
    return RowCopies(*by_row, *by_column)


def new_weight(weight: Matrices, halves: int, both: bool) -> QuantizedWeight:
    """Memory for the copies of a weight."""
    groups = weight.shape[0] if isinstance(weight, Tensor) else len(weight)
    one = first(weight)
    n, k = one.shape[-2:]
    scales = one.new_empty((groups, halves * ceil_blocks(n // halves), ceil_blocks(k)), dtype=torch.float32)
    transposed = one.new_empty((groups, k, n), dtype=E4M3) if both else None
    return QuantizedWeight(one.new_empty((groups, n, k), dtype=E4M3), transposed, scales)


def new_activation_copies(
    preact: Tensor, split_sizes: Tensor, activation: ActivationSpec, want_rows: bool, want_columns: bool
) -> RowCopies:
    """Memory for the wanted copies of an activation."""
    columns = activation.out_features(preact.shape[1])
    return new_copies(preact, split_sizes, want_rows, want_columns, columns=columns)


def new_backward_copies(
    dpostact: Tensor,
    preact: Tensor,
    split_sizes: Tensor,
    scales: Tensor | None,
    wanted: WantedCopies,
    vectors: Operands = None,
    want_vectors: bool = False,
) -> BackwardCopies:
    """Memory for what is wanted of a backward through an activation."""
    dpreact = new_copies(preact, split_sizes, wanted.want_rows, wanted.want_columns)
    postact = new_copies(dpostact, split_sizes, False, wanted.want_postact)
    dscales = scales.new_empty((preact.shape[0],)) if wanted.want_scales and scales is not None else None
    return BackwardCopies(*dpreact, *postact[2:], dscales, like_operands(vectors) if want_vectors else None)


def new_scaled_product(a: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Memory for a product of rows."""
    return a.new_empty((a.shape[0], weight.shape[1]), dtype=out_dtype or torch.bfloat16)


def new_scaled_wgrad(a: Tensor, b: Tensor, split_sizes: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Memory for the gradient of a weight."""
    return a.new_empty((split_sizes.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype or torch.bfloat16)


@kernel(new_copies, added=("exponents",))
def quantize_rows(
    x: Tensor,
    split_sizes: Tensor,
    *,
    power_of_two: bool,
    want_rows: bool = True,
    want_columns: bool = False,
    slot_of_row: Tensor | None = None,
    top_k: int = 1,
    exponents: Tensor | None = None,
) -> RowCopies:
    """The wanted copies of the rows of ``x`` [T, K].

    Args:
        slot_of_row: row r of the copies is that of the token ``slot_of_row[r] // top_k``; None: of the token r.
        exponents: of e4m3 rows, see :class:`QuantizeRows`.
    """
    copies = new_copies(x, split_sizes, want_rows, want_columns, slot_of_row)
    operands = copies.rows, copies.columns
    run(QuantizeRows(x, split_sizes, power_of_two, *operands, slot_of_row, top_k, exponents=exponents))
    return copies


@kernel(new_weight)
def quantize_weight(weight: Matrices, *, power_of_two: bool, halves: int = 1, both: bool = False) -> QuantizedWeight:
    """The bytes and scales of a weight [E, N, K]; ``both``: also the transposed bytes."""
    copies = new_weight(weight, halves, both)
    run(QuantizeWeight(weight, halves, power_of_two, copies))
    return copies


@kernel(new_activation_copies, added=("vectors",))
def quantize_activation(
    preact: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    *,
    scales: Tensor | None = None,
    power_of_two: bool,
    want_rows: bool = True,
    want_columns: bool = False,
    vectors: Operands = None,
) -> RowCopies:
    """The wanted copies of ``act(preact) * scales``, rounded before it is quantised.

    Args:
        vectors: the numbers of columns that the activation reads: see :class:`Activate`.
    """
    copies = new_activation_copies(preact, split_sizes, activation, want_rows, want_columns)
    problem = QuantizeActivation(
        *(preact, split_sizes, activation, scales, power_of_two, copies.rows, copies.columns, vectors)
    )
    if _quantises_as_it_computes(problem):
        run(problem)
        return copies
    postact = activate(preact, activation, scales, *_of_groups(vectors, split_sizes))
    return quantize_rows(
        postact, split_sizes, power_of_two=power_of_two, want_rows=want_rows, want_columns=want_columns
    )


@kernel(new_backward_copies, added=("vectors", "want_vectors"))
def quantize_activation_backward(
    dpostact: Tensor,
    preact: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    *,
    scales: Tensor | None = None,
    power_of_two: bool,
    wanted: WantedCopies,
    vectors: Operands = None,
    want_vectors: bool = False,
) -> BackwardCopies:
    """Through ``act(preact) * scales``: the wanted copies of the gradient of ``preact``; columns of the activation.

    The gradient of the scales is zero in the tail.

    Args:
        vectors: the numbers of columns that the activation reads: see :class:`Activate`.
    """
    out = new_backward_copies(dpostact, preact, split_sizes, scales, wanted, vectors, want_vectors)
    copies = out.preact
    problem = QuantizeActivationBackward(
        *(dpostact, preact, split_sizes, activation, scales, power_of_two),
        *(copies.rows, copies.columns, out.postact, out.dscales, vectors, out.dvectors),
    )
    if _quantises_as_it_computes(problem):
        run(problem)
        if not preact.shape[0]:
            _zero(out.dvectors)
        return out
    return _differentiated_and_quantised(problem, wanted.want_scales, want_vectors, out)


def _differentiated_and_quantised(
    problem: QuantizeActivationBackward, want_scales: bool, want_vectors: bool, out: BackwardCopies
) -> BackwardCopies:
    """By a kernel that differentiates, and one for each tensor that is quantised."""
    p, copies = problem, out.preact
    vectors, sizes = _of_groups(p.vectors, p.split_sizes)
    grads = activate_backward(
        p.dpostact,
        p.preact,
        p.activation,
        p.scales,
        want_scales=want_scales,
        want_postact=out.postact is not None,
        vectors=vectors,
        split_sizes=sizes,
        want_vectors=want_vectors,
    )
    if copies.rows is not None or copies.columns is not None:
        run(QuantizeRows(grads.preact, p.split_sizes, p.power_of_two, copies.rows, copies.columns))
    if grads.postact is not None:
        run(QuantizeRows(grads.postact, p.split_sizes, p.power_of_two, None, out.postact))
    if grads.scales is not None:
        zero_tail(grads.scales.unsqueeze(-1), p.split_sizes)
    return out._replace(dscales=grads.scales, dvectors=grads.vectors)


def _zero(operands: Operands) -> None:
    for each in () if operands is None else operands:
        if each is not None:
            each.zero_()


def _quantises_as_it_computes(problem: QuantizeActivation | QuantizeActivationBackward) -> bool:
    """Whether one kernel computes and quantises; a trace is told why not."""
    choice = choose(problem, tracing=trace.active())
    if choice.is_fallback and problem.preact.is_cuda:
        trace.note(f"the activation is a kernel of its own, and so is what quantises it: {choice.reason}")
    return not choice.is_fallback


def _of_groups(vectors: Operands, split_sizes: Tensor) -> tuple[Operands, Tensor | None]:
    """Numbers of columns, and the rows of each group, which nothing reads without them."""
    return vectors, None if vectors is None else split_sizes


@kernel(
    new_scaled_product,
    only_without_out=("out_dtype",),
    added=("fast_accumulation",),
    spread={"sums": ScaledSums._fields, "terms": ("bias", "bias_scale", "row_scale")},
)
def scaled_gemm(
    a: Tensor,
    a_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    split_sizes: Tensor,
    *,
    sums: ScaledSums = EXACT_SUMS,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    terms: Terms = NO_TERMS,
) -> Tensor:
    """``row_scale * (A W^T + bias_scale * bias)`` of quantised operands; see :class:`ScaledGemm`.

    Args:
        a: e4m3 [T, K], with ``a_scales``: the fields of :class:`Rows`.
        weight: e4m3 [E, N, K], or the transposed bytes of a weight, with transposed scales, for the gradient of rows.
        out: where to write; rows past the last group stay as they are.
        out_dtype: of what is allocated here; bfloat16 by default.
        terms: the bias and the factors of rows.
    """
    fresh = out is None
    if out is None:
        out = new_scaled_product(a, weight, out_dtype)
    operands, factors = (Rows(a, a_scales), weight, weight_scales), (terms.row_scale, None, terms.bias_scale)
    _multiply(ScaledGemm(*operands, sums.halves, split_sizes, out, terms.bias, *factors, fresh, sums.fast_accumulation))
    return out


@kernel(new_scaled_wgrad, only_with_out=("accumulate",), only_without_out=("out_dtype",))
def scaled_wgrad(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    split_sizes: Tensor,
    *,
    rows: int | torch.SymInt,
    out: Matrices | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
) -> Matrices:
    """``A_g B_g^T`` for each group [E, M, N], of columns of as many tokens; see :class:`ScaledWgrad`.

    Args:
        a, b: e4m3 [blocks, features, 128], with ``a_scales`` and ``b_scales``: the fields of :class:`Columns`.
        rows: T, which the number of blocks does not say. A compiler may keep it symbolic.
        out: where to write, or add, if ``accumulate``.
        out_dtype: of what is allocated here; bfloat16 by default.
    """
    columns = Columns(a, a_scales), Columns(b, b_scales)
    if out is not None and accumulate and a.is_cuda and first(out).dtype != torch.float32:
        return _added(ScaledWgrad(*columns, split_sizes, int(rows), out, accumulate))
    fresh = out is None
    if out is None:
        out = new_scaled_wgrad(a, b, split_sizes, out_dtype)
    _multiply(ScaledWgrad(*columns, split_sizes, int(rows), out, accumulate, fresh))
    return out


def _added(problem: ScaledWgrad) -> Matrices:
    """Adds to what has 16 bits: kernels add in float32, so the product is one of its own, and the sum rounded once."""
    trace.note("the weight gradient is added by a kernel of its own, since its sum has 16 bits")
    capture.refuse("PyTorch adds a weight gradient of 16 bits")
    product = new_scaled_wgrad(problem.a.data, problem.b.data, problem.split_sizes, torch.float32)
    _multiply(replace(problem, out=product, accumulate=False, fresh=True))
    if not trace.active():
        for target, values in zip(problem.out, product, strict=True):
            target.add_(values)
    return problem.out


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeroes the rows past the last group of a result allocated here; in compiled code, by operations that the compiler
    fuses.
    """
    if trace.is_traced(out):
        rows = torch.arange(out.shape[0], device=out.device)
        out.masked_fill_((rows >= split_sizes.clamp(min=0).sum()).unsqueeze(-1), 0)
    elif not trace.active() and not out.is_meta and out.shape[0]:
        products.zero_tail(out, split_sizes)


def _multiply(problem: Multiplying) -> None:
    """Runs a product, or records it in a trace."""
    choice, operand = choose(problem, trace.active()), problem.a.data
    if choice.is_fallback and operand.is_cuda:
        _multiply_in_16_bits(problem, choice.reason)
    elif trace.active() or problem.rows:
        solve(problem, choice)
    elif not operand.is_meta and isinstance(problem, ScaledWgrad) and not problem.accumulate:
        for each in (problem.out,) if isinstance(problem.out, Tensor) else problem.out:
            each.zero_()


def _multiply_in_16_bits(problem: Multiplying, reason: str) -> None:
    """As values in bfloat16, which waits for no device."""
    trace.note(f"multiplied in 16 bits: {reason}")
    dequantized.multiply(problem)
    if problem.fresh and isinstance(problem, ScaledGemm):
        zero_tail(problem.out, problem.split_sizes)
