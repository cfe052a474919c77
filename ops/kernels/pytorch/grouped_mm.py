"""``torch.nn.functional.grouped_mm``: one launch for all groups, split sizes on the device, no host synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..architecture import capability_of
from ..problems.gemm import ALL_GROUPS, GroupedGemm, Layout, Matrices, first, stacked
from . import wrong_sizes

NAME = "grouped_mm"
MAX_GROUPS = 1023


def torch_grouped_mm() -> Callable[..., Tensor] | None:
    """The function, None where this torch has none."""
    return getattr(torch.nn.functional, "grouped_mm", None)


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    a, b = problem.a, first(problem.b)
    if problem.first_group is not None:
        return ALL_GROUPS
    if torch_grouped_mm() is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if not a.is_cuda:
        return f"needs a CUDA device, got {a.device.type}"
    if capability_of(a.device) < (8, 0):
        return "needs compute capability 8.0"
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return f"needs bfloat16, got {a.dtype} and {b.dtype}"
    if problem.groups > MAX_GROUPS:
        return f"takes at most {MAX_GROUPS} groups, got {problem.groups}"
    return _misaligned(problem)


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``."""
    p = problem
    wrong_sizes.look_at(p.split_sizes, p.rows)
    ends = row_ends(p.split_sizes, p.rows)
    if p.layout is Layout.TN:
        assert isinstance(p.b, Tensor)
        result = torch.nn.functional.grouped_mm(p.a.mT, p.b, offs=ends)
        result = torch.where(
            (p.split_sizes > 0).view(-1, 1, 1), result, 0
        )  # older kernels leave empty groups unwritten
        _write_weights(p, result)
    else:
        weights = stacked(p.b)
        result = torch.nn.functional.grouped_mm(p.a, weights.mT if p.layout is Layout.NT else weights, offs=ends)
        write_rows(p, result, ends)


def column_sums(rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """``out[g]`` = the sum of the rows of group g, each times its scale, in a fixed order."""
    sizes = _clamped_sizes(split_sizes, rows.shape[0])
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    wide = wide if scale is None else wide * scale.unsqueeze(-1)
    out.copy_(torch.segment_reduce(wide, "sum", lengths=sizes, axis=0, unsafe=True, initial=0))


def row_dots(rows: Tensor, vectors: Matrices, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    ends = row_ends(split_sizes, rows.shape[0])
    wide = torch.promote_types(rows.dtype, torch.float32)
    dots = (rows.to(wide) * stacked(vectors)[group_of_row(ends, rows.shape[0])]).sum(-1)
    out.copy_(torch.where(_is_valid(ends, rows.shape[0]), dots, 0))


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeros the rows past the last group."""
    ends = row_ends(split_sizes, out.shape[0])
    out.masked_fill_(~_is_valid(ends, out.shape[0]).unsqueeze(-1), 0)


def row_ends(split_sizes: Tensor, rows: int) -> Tensor:
    """int32 [E]: where each group ends; whatever the sizes say, inside the buffer."""
    return split_sizes.clamp(0, rows).cumsum(0).clamp(max=rows).to(torch.int32)  # clamped before, sums do not wrap


def _misaligned(problem: GroupedGemm) -> str | None:
    """grouped_mm wants rows of a multiple of 16 bytes that start at a multiple of 16 bytes."""
    for name, tensor in (("a", problem.a), ("b", first(problem.b))):
        rows, columns = tensor.stride()[-2:]
        if 1 not in (rows, columns):
            return f"{name} has no dimension of stride 1"
        if max(rows, columns) * tensor.element_size() % 16 or tensor.shape[-1] * tensor.element_size() % 16:
            return f"rows of {name} are not a multiple of 16 bytes"
        if tensor.storage_offset() * tensor.element_size() % 16:
            return f"{name} does not start at a multiple of 16 bytes"
    return None


def write_rows(p: GroupedGemm, result: Tensor, ends: Tensor) -> None:
    """Writes products of rows, with factors and bias, where the groups end there."""
    assert isinstance(p.out, Tensor)
    group = None
    if isinstance(p.alpha, Tensor) or p.bias is not None or isinstance(p.beta, Tensor):
        group = group_of_row(ends, p.rows)
    wide = _wide(p)
    if p.alpha is not None:
        result = result.to(wide) * _by_row(p.alpha, group)
    if p.bias is not None:
        bias = stacked(p.bias)[group].to(wide)
        result = result + (bias if p.bias_scale is None else p.bias_scale.unsqueeze(-1) * bias)
    if p.row_scale is not None:
        result = result.to(wide) * p.row_scale.unsqueeze(-1)
    if p.beta is not None:
        result = result + _by_row(p.beta, group) * p.out.to(wide)
    torch.where(_is_valid(ends, p.rows).unsqueeze(-1), result.to(p.out.dtype), p.out, out=p.out)


def _write_weights(p: GroupedGemm, result: Tensor) -> None:
    for g, out in enumerate([p.out] if isinstance(p.out, Tensor) else p.out):
        part, wide = result if isinstance(p.out, Tensor) else result[g], _wide(p)
        if p.alpha is not None:
            part = part.to(wide) * _by_group(p.alpha, g, part)
        if p.bias is not None:
            part = part.to(wide) + (p.bias[g] if part.dim() == 2 else stacked(p.bias).unsqueeze(1))
        out.copy_(part if p.beta is None else part + _by_group(p.beta, g, part) * out.to(wide))


def _wide(p: GroupedGemm) -> torch.dtype:
    """The dtype of factors, bias and sum, which are applied to torch's rounded product before a second rounding."""
    return torch.promote_types(first(p.out).dtype, torch.float32)


def _by_row(factor: float | Tensor, group: Tensor | None) -> float | Tensor:
    return factor[group].unsqueeze(-1) if isinstance(factor, Tensor) and factor.dim() else factor


def _by_group(factor: float | Tensor, g: int, part: Tensor) -> float | Tensor:
    if not isinstance(factor, Tensor) or not factor.dim():
        return factor
    return factor.view(-1, 1, 1) if part.dim() == 3 else factor[g]


def _clamped_sizes(split_sizes: Tensor, rows: int) -> Tensor:
    ends = row_ends(split_sizes, rows)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def group_of_row(ends: Tensor, rows: int) -> Tensor:
    """int64 [T]: the group of each row; that of the last for the tail."""
    group = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    return group.clamp(max=ends.shape[0] - 1)


def _is_valid(ends: Tensor, rows: int) -> Tensor:
    return torch.arange(rows, device=ends.device) < ends[-1]
