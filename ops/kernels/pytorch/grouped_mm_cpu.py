"""``torch.nn.functional.grouped_mm`` on a CPU: the products of the loop, without a Python loop.

It allocates its results, so it only serves products whose memory is allocated here. Epilogues follow over all rows,
which are few enough to be in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..problems.gemm import ALL_GROUPS, Activate, GroupedGemm, Layout
from . import activation, few_rows, loop
from .grouped_mm import NAME, row_ends, torch_grouped_mm

__all__ = ["NAME", "refusal", "run"]

ALIGNED = 16  # bytes; rows are multiples of it
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem is not run here, because it cannot be, or because the loop is faster; None: it is.

    Every product of a CPU is asked, so conditions are written out: a call costs as much as several of them.
    """
    p, a, b, out = problem, problem.a, problem.b, problem.out
    if not p.fresh:
        return "gives memory of its own, and cannot write into a buffer"
    if problem.first_group is not None:
        return ALL_GROUPS
    if not isinstance(b, Tensor) or not isinstance(out, Tensor):
        return "needs stacked matrices"
    dtype = a.dtype
    if dtype not in _DTYPES or a.device.type != "cpu":
        return f"needs a CPU and 16 or 32 bits, got {a.device.type} and {dtype}"
    factors = p.alpha is not None or p.beta is not None or p.bias_scale is not None
    if factors or b.dtype != dtype or out.dtype != dtype:
        return "takes one dtype, and no factor except scales of rows"
    if p.bias is not None and (p.layout is Layout.TN or dtype.itemsize < 4):
        return "adds a bias after the product, which must not be rounded to 16 bits before"
    if few_rows.leave_most_groups_empty(a.shape[0], p.split_sizes.shape[0]):
        return "takes longer than a loop over the few groups that have rows"
    followed = a.shape[0] > few_rows.FEW and (p.epilogue is not None or p.bias is not None)
    if followed and not few_rows.are_few(*p.mnk[:2], dtype):
        return "would evict all rows from the cache before the activation or the bias reads them"
    if torch_grouped_mm() is None:
        return f"torch {torch.__version__} has no grouped_mm"
    for tensor in (a, b):
        *_, pitch, step = tensor.stride()
        if step != 1 or pitch * dtype.itemsize % ALIGNED or tensor.shape[-1] * dtype.itemsize % ALIGNED:
            return f"needs dense rows of a multiple of {ALIGNED} bytes"
    return None


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out`` and the results of its epilogue; rows past the last group become zero."""
    p, epilogue = problem, problem.epilogue
    assert isinstance(p.out, Tensor)
    loop.keep_freed_memory()
    fresh = epilogue.preact if isinstance(epilogue, Activate) else p.out if epilogue is None else None
    if fresh is not None:
        fresh.set_()  # type: ignore[call-overload]  # lets go of memory that is not needed
    ends, end = _ends(p)
    result = product(p, ends)
    if p.bias is not None:
        groups = few_rows.groups_of(loop.group_sizes(p.split_sizes, p.rows))
        few_rows.add_vectors(result[: len(groups)], p.bias, groups)
    if p.row_scale is not None:
        result.mul_(p.row_scale.unsqueeze(-1))
    if end < p.rows and p.layout is not Layout.TN:
        result[end:].zero_()
    if fresh is not None:
        fresh.set_(result.contiguous())  # type: ignore[call-overload]
    if isinstance(epilogue, Activate):
        activation.forward(result, epilogue.spec, epilogue.scales, p.out, p.of_groups)
    elif epilogue is not None:
        activation.backward(result, epilogue.preact, epilogue.spec, epilogue.scales, epilogue.grads, p.of_groups)


def _ends(p: GroupedGemm) -> tuple[Tensor, int]:
    """The end of each group, and the last end; clipped to the buffer."""
    sizes = p.split_sizes.tolist()
    end = sum(sizes)
    if min(sizes) >= 0 and end <= p.rows:  # then one operation says it
        return p.split_sizes.cumsum(0, dtype=torch.int32), end
    ends = row_ends(p.split_sizes, p.rows)
    return ends, int(ends[-1])


def product(p: GroupedGemm, ends: Tensor) -> Tensor:
    """The product alone, not refused, given where each group ends; rows past the last may be anything."""
    multiply = F.grouped_mm
    b: Any = p.b
    _ = p.a.data_ptr(), b.data_ptr()  # raises for tensors of a transform, which have no memory to take
    if p.layout is Layout.TN:
        return multiply(p.a.mT, b, offs=ends)
    return multiply(p.a, b.mT if p.layout is Layout.NT else b, offs=ends)
