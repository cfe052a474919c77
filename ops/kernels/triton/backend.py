"""The problems that Triton solves: products, passes over rows that know groups, and the routing of tokens."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter

import torch

from ..problems import kinds
from ..problems.gemm import GroupedGemm
from ..problems.interface import GemmImplementation, Implementation, Implementations, solving
from ..problems.rows import RowPass
from . import gemm, permutation, row_kernels
from .installed import NAME


def _rows_refusal(p: RowPass) -> str | None:
    return row_kernels.refusal(p.rows, p.split_sizes, p.out)


def _gemm_key(p: GroupedGemm) -> Hashable | None:
    """Products of float32 are taken by their numbers of rows, too."""
    return None if p.a.dtype == torch.float32 else p.cache_key


_GEMM = GemmImplementation(
    *(NAME, gemm.name_of, gemm.run, gemm.refusal, _gemm_key),
    device="cuda",
    interpreted=True,
    has_epilogues=True,
    epilogue_refusal=gemm.epilogue_refusal,
    finishes_backward=True,
)

_ROWS = Implementation(*(NAME, NAME, solving(row_kernels), _rows_refusal), device="cuda", interpreted=True)

_PERMUTATION = Implementation(
    *(NAME, lambda p: f"{NAME} ({p.PASS})", permutation.run, permutation.refusal, attrgetter("cache_key")),
    device="cuda",
    interpreted=True,
)

KERNELS: Implementations = (
    (kinds.GEMM, _GEMM),
    (kinds.ROW_PASS, _ROWS),
    (kinds.PERMUTATION, _PERMUTATION),
)
