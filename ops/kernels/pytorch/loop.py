"""A loop over groups, one ``torch.mm`` each, into one output. Any device and dtype; needs the sizes on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..architecture import is_capturing
from ..problems.gemm import Activate, ActivateBackward, FunctionOperands, GroupedGemm, Layout, Matrices, Operands
from . import activation, captured_rows, few_rows

NAME = "loop"
SPAN = few_rows.FEW


class Span(NamedTuple):
    """Neighbouring groups: their sizes, the first of them, and all their rows."""

    sizes: list[int]
    first_group: int
    rows: slice


@cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory on a CPU; done once.

    glibc returns the free end of its heap to the system beyond twice the largest block that was ever freed, up to 64
    MB. Outputs of some megabytes are then mapped again page by page, at every call. A block of 31 MB, never touched, is
    the largest that counts.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    return captured_rows.refusal(problem) if is_capturing(problem.a.device) else None


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``, and the results of its epilogue."""
    epilogue = problem.epilogue
    if problem.a.is_cuda and is_capturing(problem.a.device):
        captured_rows.run(problem)
    elif type(epilogue) is Activate:
        _activate(problem, epilogue)
    elif epilogue is not None:
        _activate_backward(problem, epilogue)
    else:
        keep_freed_memory()
        span = _span_of(problem)
        _multiply_groups(problem, span, problem.out[span.rows.start :] if span.first_group else problem.out)


def multiply_weights_of_runs(left: Tensor, right: Tensor, sizes: Mapping[int, int], out: Tensor) -> None:
    """``out[g] = left[rows of g].T right[rows of g]``, and 0 for groups without rows; those with rows are in order."""
    parts = [*sizes.values()]
    parts.append(left.shape[0] - sum(parts))
    _zero_between(out, [*sizes])
    groups = [out[g] for g in sizes]
    _multiply_parts(zip(left.mT.split_with_sizes(parts, 1), right.split_with_sizes(parts), groups, strict=False))


def _zero_between(out: Tensor, groups: list[int]) -> None:
    """Zeroes runs of groups that products do not write; memory bandwidth limits the weight gradients of few rows."""
    start = 0
    for g in [*groups, out.shape[0]]:
        if start < g:
            out[start:g].zero_()
        start = g + 1


def _activate(problem: GroupedGemm, epilogue: Activate) -> None:
    """Runs some groups at a time, so that the activation reads rows that are still in the cache."""
    preact, out = epilogue.preact, problem.out
    assert type(out) is Tensor
    for span in _spans(problem):
        rows = span.rows
        part = out.new_empty((rows.stop - rows.start, problem.mnk[1])) if preact is None else preact[rows]
        _multiply_groups(problem, span, part)
        scales = _rows(epilogue.scales, rows)
        matrices = _rows_of(epilogue.matrices, rows)
        activation.forward(part, epilogue.spec, scales, out[rows], _of_span(epilogue.vectors, span, problem, matrices))


def _activate_backward(problem: GroupedGemm, epilogue: ActivateBackward) -> None:
    """Some groups at a time; the gradient of the hidden rows never exists as a whole."""
    preact, grads = epilogue.preact, epilogue.grads
    for span in [_span_of(problem)] if _sums_all_rows(epilogue) else _spans(problem):
        rows = span.rows
        dpostact = preact.new_empty((rows.stop - rows.start, problem.mnk[1]))
        _multiply_groups(problem, span, dpostact)
        scales, of_groups = _rows(epilogue.scales, rows), _of_span(epilogue.vectors, span, problem)
        of_span = grads.rows(rows)._replace(vectors=_vectors_of(grads.vectors, span))
        activation.backward(dpostact, preact[rows], epilogue.spec, scales, of_span, of_groups)


def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> None:
    """One group: ``out = row_scale * (alpha * a b + bias_scale * bias) + beta * out``, rounded once."""
    unscaled = alpha is None and bias_scale is None and row_scale is None and out.dtype == a.dtype == b.dtype
    if unscaled and beta is None and bias is None:
        torch.mm(a, b, out=out)
    elif unscaled and beta is None and bias is not None and bias.dtype == out.dtype:
        torch.addmm(bias, a, b, out=out)
    elif unscaled and beta == 1.0 and bias is None:
        out.addmm_(a, b)
    else:
        wide = torch.promote_types(out.dtype, torch.float32)
        result = a.to(wide) @ b.to(wide)
        result = result if alpha is None else result * alpha
        if bias is not None:
            result += bias if bias_scale is None else bias_scale.unsqueeze(-1) * bias.to(wide)
        result = result if row_scale is None else result * row_scale.unsqueeze(-1)
        out.copy_(result if beta is None else result + beta * out.to(wide))


def column_sums(rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """``out[g]`` = the sum of the rows of group g, each times its scale."""
    if few_rows.are_few(rows.shape[0], rows.shape[1], rows.dtype) and not rows.is_cuda:
        groups = few_rows.groups_of(group_sizes(split_sizes, rows.shape[0]))
        scale = None if scale is None else scale[: len(groups)]
        out.copy_(few_rows.column_sums(rows[: len(groups)], groups, out.shape[0], scale))
        return
    wide = torch.promote_types(rows.dtype, torch.float32)
    for g, (start, end) in enumerate(row_bounds(split_sizes, rows.shape[0])):
        part = rows[start:end] if scale is None else rows[start:end] * scale[start:end].unsqueeze(-1)
        out[g] = part.sum(0, dtype=wide)


def row_dots(rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    out.zero_()
    if few_rows.are_few(rows.shape[0], rows.shape[1], rows.dtype) and not rows.is_cuda:
        groups = few_rows.groups_of(group_sizes(split_sizes, rows.shape[0]))
        out[: len(groups)] = few_rows.row_dots(rows[: len(groups)], vectors, groups)
        return
    wide = torch.promote_types(rows.dtype, torch.float32)
    for g, (start, end) in enumerate(row_bounds(split_sizes, rows.shape[0])):
        out[start:end] = rows[start:end].to(wide) @ vectors[g].to(wide)


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeros the rows past the last group."""
    end = sum(group_sizes(split_sizes, out.shape[0]))
    if end < out.shape[0]:
        out[end:].zero_()


def group_sizes(split_sizes: Tensor, rows: int) -> list[int]:
    """The sizes on the host, cut off where the buffer ends."""
    sizes = _on_host(split_sizes)
    if not sizes or (min(sizes) >= 0 and sum(sizes) <= rows):
        return sizes
    return [end - start for start, end in row_bounds(split_sizes, rows)]


def row_bounds(split_sizes: Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """First row and end of each group; whatever the sizes say, inside the buffer."""
    start = 0
    for size in _on_host(split_sizes):
        end = min(start + max(size, 0), rows)
        yield start, end
        start = end


def _multiply_groups(p: GroupedGemm, span: Span, out: Matrices) -> None:
    """The products of the groups of a span. ``out`` has its rows, or under TN a matrix for each of its groups."""
    if p.layout is Layout.TN:
        _multiply_weights(p, span.sizes, out)
        return
    assert isinstance(out, Tensor)
    groups = [g for g, size in enumerate(span.sizes, span.first_group) if size]
    sizes = [size for size in span.sizes if size]
    weights = _matrices(p.b, [g - (p.first_group or 0) for g in groups], p.layout is Layout.NT)
    rows = span.rows
    out = out[: rows.stop - rows.start]
    parts = zip(p.a[rows].split_with_sizes(sizes), weights, out.split_with_sizes(sizes), strict=True)
    if p.is_product_alone or (p.is_scaled_product and (not p.a.is_cuda or p.a.dtype.itemsize > 2)):
        # a CPU has no product from 16 bits to 32, so scales multiply what torch has rounded: thrice as fast
        _multiply_parts(parts)
        if p.row_scale is not None:
            out.mul_(p.row_scale[rows].unsqueeze(-1))
        return
    start = rows.start
    for g, (left, right, part) in zip(groups, parts, strict=True):
        of_group = slice(start, start + left.shape[0])
        start, bias = of_group.stop, None if p.bias is None else p.bias[g]
        scales = _rows(p.bias_scale, of_group), _rows(p.row_scale, of_group)
        multiply(left, right, part, factor_of(p.alpha, g), factor_of(p.beta, g), bias, *scales)


def _multiply_weights(p: GroupedGemm, sizes: list[int], out: Matrices) -> None:
    """TN: a matrix for each group, also for those without rows."""
    assert isinstance(p.b, Tensor)
    if p.is_product_alone and isinstance(out, Tensor) and few_rows.leave_most_groups_empty(p.rows, len(sizes)):
        return multiply_weights_of_runs(p.a, p.b, {g: size for g, size in enumerate(sizes) if size}, out)
    end = sum(sizes)
    parts = zip(p.a[:end].mT.split_with_sizes(sizes, 1), p.b[:end].split_with_sizes(sizes), list(out), strict=True)
    if p.is_product_alone:
        return _multiply_parts(parts)
    for g, (left, right, part) in enumerate(parts):
        bias = None if p.bias is None else p.bias[g]
        multiply(left, right, part, factor_of(p.alpha, g), factor_of(p.beta, g), bias)


def _multiply_parts(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    for left, right, part in parts:
        torch.mm(left, right, out=part)


def _matrices(weights: Matrices, groups: list[int], transposed: bool) -> list[Tensor]:
    """The matrices of some groups; all at once if most are wanted."""
    if isinstance(weights, Tensor):
        weights = weights.mT if transposed else weights
        if len(groups) == weights.shape[0]:
            return list(weights.unbind())
        if 4 * len(groups) < weights.shape[0]:
            return [weights[g] for g in groups]
        weights = weights.unbind()
        return [weights[g] for g in groups]
    return [weights[g].mT if transposed else weights[g] for g in groups]


def _spans(problem: GroupedGemm) -> Iterator[Span]:
    """Neighbouring groups, with at least ``SPAN`` rows but for the last."""
    sizes: list[int] = []
    first_group = first_row = count = 0
    for g, size in enumerate(group_sizes(problem.split_sizes, problem.rows), 1):
        sizes.append(size)
        count += size
        if count >= SPAN or g == problem.groups:
            end = first_row + count
            yield Span(sizes, first_group, slice(first_row, end))
            sizes, first_group, first_row, count = [], g, end, 0


def _on_host(split_sizes: Tensor) -> list[int]:
    sizes: list[int] = split_sizes.tolist()
    return sizes


def factor_of(factor: float | Tensor | None, group: int) -> float | Tensor | None:
    """A group's factor."""
    return factor[group] if isinstance(factor, Tensor) and factor.dim() else factor


def _span_of(problem: GroupedGemm) -> Span:
    """All groups, or those of a run."""
    sizes, first = group_sizes(problem.split_sizes, problem.rows), problem.first_group
    if first is None:
        return Span(sizes, 0, slice(0, sum(sizes)))
    start, of_span = sum(sizes[:first]), sizes[first : first + len(problem.b)]
    return Span(of_span, first, slice(start, start + sum(of_span)))


def _sums_all_rows(epilogue: ActivateBackward) -> bool:
    """Whether a gradient is summed over the rows of all groups."""
    program = epilogue.spec.program
    return epilogue.grads.vectors is not None and program is not None and any(n[0] == "a" for n in program.columns)


def _of_span(vectors: Operands, span: Span, problem: GroupedGemm, matrices: Operands = None) -> FunctionOperands | None:
    if vectors is None and matrices is None:
        return None
    return FunctionOperands(_vectors_of(vectors, span), problem.split_sizes.new_tensor(span.sizes), matrices)


def _rows_of(matrices: Operands, rows: slice) -> Operands:
    """Some rows of each [T, F]."""
    return None if matrices is None else [None if each is None else each[rows] for each in matrices]


def _vectors_of(vectors: Operands, span: Span) -> Operands:
    """The vectors [groups of the span, F] of each [E, F]; those of all rows [1, F] unchanged."""
    groups = slice(span.first_group, span.first_group + len(span.sizes))
    if vectors is None or isinstance(vectors, Tensor):
        return None if vectors is None else vectors[:, groups]
    return [None if each is None else each[groups] if each.shape[0] > 1 else each for each in vectors]


def _rows(column: Tensor | None, rows: slice) -> Tensor | None:
    return None if column is None else column[rows]
