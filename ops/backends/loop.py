"""A loop over groups, one ``torch.mm`` each, into one output. Any device and dtype; needs the sizes on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..activations import ActivationSpec
from . import pointwise
from .pointwise import ActivationGrads
from .problem import GroupedGemm, Layout, Matrices

NAME = "loop"
_SPAN = 512


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    return "reads split sizes on the host, which a CUDA graph cannot" if _capturing(problem.a) else None


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``."""
    for g, (start, end) in enumerate(row_bounds(problem.split_sizes, problem.rows)):
        rows = slice(start, end)
        out = problem.out[g] if problem.layout is Layout.TN else problem.out[rows]
        _product(problem, g, rows, out)  # type: ignore[arg-type]


def linear_activation(
    problem: GroupedGemm, spec: ActivationSpec, scales: Tensor | None, pre: Tensor | None, hidden: Tensor
) -> None:
    """Some groups at a time, so that what the activation reads is still in the cache."""
    for groups, rows in _spans(problem):
        part = hidden.new_empty((rows.stop - rows.start, problem.mnk[1])) if pre is None else pre[rows]
        for g, own in groups:
            _product(problem, g, own, part[own.start - rows.start : own.stop - rows.start])
        pointwise.forward(part, spec, _rows(scales, rows), hidden[rows])


def linear_activation_backward(
    problem: GroupedGemm, pre: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads
) -> None:
    """Some groups at a time; the gradient of the hidden rows never exists as a whole."""
    for groups, rows in _spans(problem):
        dhidden = pre.new_empty((rows.stop - rows.start, problem.mnk[1]))
        for g, own in groups:
            _product(problem, g, own, dhidden[own.start - rows.start : own.stop - rows.start])
        pointwise.backward(dhidden, pre[rows], spec, _rows(scales, rows), out.rows(rows))


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
    plain = alpha is None and bias_scale is None and row_scale is None and out.dtype == a.dtype == b.dtype
    if plain and beta is None and bias is None:
        torch.mm(a, b, out=out)
    elif plain and beta is None and bias is not None and bias.dtype == out.dtype:
        torch.addmm(bias, a, b, out=out)
    elif plain and beta == 1.0 and bias is None:
        out.addmm_(a, b)
    else:
        wide = torch.promote_types(out.dtype, torch.float32)
        result = a.to(wide) @ b.to(wide)
        result = result if alpha is None else result * alpha
        if bias is not None:
            result += bias if bias_scale is None else bias_scale.unsqueeze(-1) * bias
        result = result if row_scale is None else result * row_scale.unsqueeze(-1)
        out.copy_(result if beta is None else result + beta * out)


def column_sums(rows: Tensor, split_sizes: Tensor, out: Tensor) -> None:
    """``out[g]`` = the sum of the rows of group g."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    for g, (start, end) in enumerate(row_bounds(split_sizes, rows.shape[0])):
        out[g] = rows[start:end].sum(0, dtype=wide)


def row_dots(rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    out.zero_()
    for g, (start, end) in enumerate(row_bounds(split_sizes, rows.shape[0])):
        out[start:end] = rows[start:end].to(wide) @ vectors[g].to(wide)


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeros the rows past the last group."""
    bounds = list(row_bounds(split_sizes, out.shape[0]))
    out[bounds[-1][1] if bounds else 0 :].zero_()


def row_bounds(split_sizes: Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """First row and end of each group; whatever the sizes say, inside the buffer."""
    start = 0
    for size in _on_host(split_sizes):
        end = min(start + max(size, 0), rows)
        yield start, end
        start = end


def _product(p: GroupedGemm, g: int, rows: slice, out: Tensor) -> None:
    """The product of group ``g``, which has these rows."""
    if p.layout is Layout.TN:
        assert isinstance(p.b, Tensor)
        a, b = p.a[rows].mT, p.b[rows]
    else:
        a, b = p.a[rows], p.b[g].mT if p.layout is Layout.NT else p.b[g]
    bias = None if p.bias is None else p.bias[g]
    multiply(a, b, out, of(p.alpha, g), of(p.beta, g), bias, _rows(p.bias_scale, rows), _rows(p.row_scale, rows))


def _spans(problem: GroupedGemm) -> Iterator[tuple[list[tuple[int, slice]], slice]]:
    """Neighbouring groups and all their rows: at least ``_SPAN`` rows but for the last."""
    groups: list[tuple[int, slice]] = []
    for g, (start, end) in enumerate(row_bounds(problem.split_sizes, problem.rows)):
        groups.append((g, slice(start, end)))
        if end - groups[0][1].start >= _SPAN:
            yield groups, slice(groups[0][1].start, end)
            groups = []
    if groups:
        yield groups, slice(groups[0][1].start, groups[-1][1].stop)


def _on_host(split_sizes: Tensor) -> Sequence[int]:
    sizes: Sequence[int] = split_sizes.tolist()
    return sizes


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def of(factor: float | Tensor | None, group: int) -> float | Tensor | None:
    """A group's factor."""
    return factor[group] if isinstance(factor, Tensor) and factor.dim() else factor


def _rows(column: Tensor | None, rows: slice) -> Tensor | None:
    return None if column is None else column[rows]
