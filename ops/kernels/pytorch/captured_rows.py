"""Products of few rows inside a CUDA graph, where a loop over groups cannot read their sizes: a matrix for each row."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..problems.gemm import ALL_GROUPS, Activate, ActivateBackward, GroupedGemm, Layout, first, stacked
from . import activation, wrong_sizes
from .grouped_mm import group_of_row, row_ends, write_rows

FEW = 16


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be part of a CUDA graph; None: it can. The matrices of rows take memory of their own."""
    p, most = problem, max(FEW, problem.groups)
    if problem.first_group is not None:
        return ALL_GROUPS
    if p.layout is Layout.TN or isinstance(p.epilogue, ActivateBackward) or p.rows > most:
        return f"reads split sizes on the host, which a CUDA graph cannot, except in a forward of at most {most} rows"
    return None


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``, and the results of its epilogue."""
    p, epilogue = problem, problem.epilogue
    if not isinstance(epilogue, Activate):
        return _multiply(p)
    preact = p.a.new_empty(p.rows, p.mnk[1]) if epilogue.preact is None else epilogue.preact
    _multiply(replace(p, out=preact, epilogue=None))
    activation.forward(preact, epilogue.spec, epilogue.scales, first(p.out), p.of_groups)


def _multiply(p: GroupedGemm) -> None:
    wrong_sizes.look_at(p.split_sizes, p.rows)
    ends, weights = row_ends(p.split_sizes, p.rows), stacked(p.b)
    weights = weights.mT if p.layout is Layout.NT else weights
    result = torch.bmm(p.a.unsqueeze(1), weights[group_of_row(ends, p.rows)]).squeeze(1)
    write_rows(p, result, ends)
