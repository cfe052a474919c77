"""A loop over groups, one ``torch.mm`` each, into one output. Any device and dtype; needs the sizes on the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from ...activation_spec import ActivationSpec
from ..function import FunctionKernels
from ..interface import ActivationKernels
from ..problem import Activate, ActivateBackward, GroupedGemm, Layout, Matrices
from . import activation, pointwise

NAME = "loop"
_SPAN = 512


@cache
def _keep_freed_memory() -> None:
    """Lets glibc keep what is freed, once, on a CPU.

    It hands the free end of its heap back to the system beyond twice the largest block that was ever freed, up to
    64 MB; outputs of some megabytes are then fetched again page by page, at every call. A block of 31 MB, never
    touched, is the largest that counts.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    return "reads split sizes on the host, which a CUDA graph cannot" if _capturing(problem.a) else None


def epilogue_refusal(problem: GroupedGemm) -> str | None:
    """None: the loop runs every epilogue, some groups at a time."""
    return None


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``, and what its epilogue gives."""
    epilogue = problem.epilogue
    if type(epilogue) is Activate:
        _activate(problem, epilogue)
    elif epilogue is not None:
        _activate_backward(problem, epilogue)
    else:
        _keep_freed_memory()
        sizes = group_sizes(problem.split_sizes, problem.rows)
        outs = problem.out if problem.layout is Layout.TN else _split(problem.out, sizes)  # type: ignore[arg-type]
        _multiply_groups(problem, sizes, list(outs))


def _activate(problem: GroupedGemm, epilogue: Activate) -> None:
    """Some groups at a time, so that what the activation reads is still in the cache."""
    preact, out = epilogue.preact, problem.out
    assert type(out) is Tensor
    for sizes, first_group, rows in _spans(problem):
        part = out.new_empty((rows.stop - rows.start, problem.mnk[1])) if preact is None else preact[rows]
        _multiply_groups(problem, sizes, _split(part, sizes), first_group, rows.start)
        _kernels(epilogue.spec).forward(part, epilogue.spec, _rows(epilogue.scales, rows), out[rows])


def _activate_backward(problem: GroupedGemm, epilogue: ActivateBackward) -> None:
    """Some groups at a time; the gradient of the hidden rows never exists as a whole."""
    preact, grads = epilogue.preact, epilogue.grads
    for sizes, first_group, rows in _spans(problem):
        dpostact = preact.new_empty((rows.stop - rows.start, problem.mnk[1]))
        _multiply_groups(problem, sizes, _split(dpostact, sizes), first_group, rows.start)
        scales = _rows(epilogue.scales, rows)
        _kernels(epilogue.spec).backward(dpostact, preact[rows], epilogue.spec, scales, grads.rows(rows))


def _kernels(spec: ActivationSpec) -> ActivationKernels:
    return activation if spec.program is None else FunctionKernels(pointwise, spec.program)


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
    wide = torch.promote_types(rows.dtype, torch.float32)
    for g, (start, end) in enumerate(row_bounds(split_sizes, rows.shape[0])):
        part = rows[start:end] if scale is None else rows[start:end] * scale[start:end].unsqueeze(-1)
        out[g] = part.sum(0, dtype=wide)


def row_dots(rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    out.zero_()
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


def _multiply_groups(
    p: GroupedGemm, sizes: list[int], outs: list[Tensor], first_group: int = 0, first_row: int = 0
) -> None:
    """The products of neighbouring groups of these sizes, the first of which begins at ``first_row``."""
    end, groups = first_row + sum(sizes), slice(first_group, first_group + len(sizes))
    rows = p.a[first_row:end]
    if p.layout is Layout.TN:
        assert isinstance(p.b, Tensor)
        a, b = rows.mT.split_with_sizes(sizes, 1), p.b[first_row:end].split_with_sizes(sizes)
    else:
        a, b = rows.split_with_sizes(sizes), _matrices(p.b[groups], p.layout is Layout.NT)
    if p.is_product_alone:
        for left, right, out in zip(a, b, outs, strict=True):
            torch.mm(left, right, out=out)
        return
    start = first_row
    for g, (left, right, out) in enumerate(zip(a, b, outs, strict=True), first_group):
        group_rows = slice(start, start + sizes[g - first_group])
        if group_rows.stop == start and p.layout is not Layout.TN:
            continue  # no rows, nothing to write
        start, bias = group_rows.stop, None if p.bias is None else p.bias[g]
        multiply(
            left,
            right,
            out,
            factor_of(p.alpha, g),
            factor_of(p.beta, g),
            bias,
            _rows(p.bias_scale, group_rows),
            _rows(p.row_scale, group_rows),
        )


def _matrices(weights: Matrices, transposed: bool) -> tuple[Tensor, ...]:
    if isinstance(weights, Tensor):
        return (weights.mT if transposed else weights).unbind()
    return tuple(weight.mT if transposed else weight for weight in weights)


def _split(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """The rows of each group; those past the last group are in none."""
    return list(rows[: sum(sizes)].split_with_sizes(sizes))


def _spans(problem: GroupedGemm) -> Iterator[tuple[list[int], int, slice]]:
    """Neighbouring groups: their sizes, the first one, and all their rows, at least ``_SPAN`` but for the last."""
    sizes: list[int] = []
    first_group = first_row = 0
    for g, size in enumerate(group_sizes(problem.split_sizes, problem.rows), 1):
        sizes.append(size)
        end = first_row + sum(sizes)
        if end - first_row >= _SPAN or g == problem.groups:
            yield sizes, first_group, slice(first_row, end)
            sizes, first_group, first_row = [], g, end


def _on_host(split_sizes: Tensor) -> list[int]:
    sizes: list[int] = split_sizes.tolist()
    return sizes


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def factor_of(factor: float | Tensor | None, group: int) -> float | Tensor | None:
    """A group's factor."""
    return factor[group] if isinstance(factor, Tensor) and factor.dim() else factor


def _rows(column: Tensor | None, rows: slice) -> Tensor | None:
    return None if column is None else column[rows]
