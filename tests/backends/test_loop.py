"""Work that the loop over groups, and the door on its behalf, skip: it would cost time and change no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible.ops import kernels
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout
from fusible.ops.kernels.pytorch import loop
from fusible.ops.values.activation_spec import ActivationSpec

E, K, N = 4, 8, 16


def problem(sizes: list[int], **how: Any) -> GroupedGemm:
    a, b = torch.randn(sum(sizes), K), torch.randn(len(sizes), N, K)
    return GroupedGemm(Layout.NT, a, b, torch.tensor(sizes), torch.empty(sum(sizes), N), **how)


def test_a_span_ends_with_the_group_that_fills_it() -> None:
    spans = list(loop._spans(problem([500, 12, 1, 511, 700, 3])))

    assert [sizes for sizes, *_ in spans] == [[500, 12], [1, 511], [700], [3]]
    assert [(first, rows.start, rows.stop) for _, first, rows in spans] == [
        (0, 0, 512),
        (2, 512, 1024),
        (4, 1024, 1724),
        (5, 1724, 1727),
    ]


def test_groups_without_rows_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied, multiply = [], loop.multiply
    monkeypatch.setattr(loop, "multiply", lambda a, *how: multiplied.append(len(a)) or multiply(a, *how))
    loop.run(problem([3, 0, 0, 2], bias=torch.randn(E, N)))

    assert multiplied == [3, 2]


@pytest.mark.parametrize("separate", [True, False])
def test_results_of_no_rows_are_scaled(separate: bool) -> None:
    before, beta = torch.randn(E, K, N), torch.linspace(0.5, 2, E)
    out = list(before.clone()) if separate else before.clone()
    sizes = torch.zeros(E, dtype=torch.int64)
    x, dy, terms = torch.randn(0, K), torch.randn(0, N), kernels.Terms(beta=beta)
    kernels.grouped_gemm(Layout.TN, x, dy, sizes, out=out, terms=terms)

    assert torch.equal(torch.stack(out) if isinstance(out, list) else out, beta[:, None, None] * before)


@pytest.mark.parametrize(("tail_unspecified", "cleared"), [(True, 0), (False, 2)])
def test_tails_that_only_grouped_products_read_are_not_cleared(
    tail_unspecified: bool, cleared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(loop, "zero_tail", lambda out, sizes: calls.append(len(out)))
    x, weight, sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([3, 0, 1, 2])
    call = kernels.ActivationCall(None, keep_preact=True, tail_unspecified=tail_unspecified)
    kernels.grouped_linear_activation(x, weight, sizes, ActivationSpec("silu"), kernels.NO_TERMS, call)

    assert len(calls) == cleared


@pytest.mark.parametrize("sizes", [{0: 2, 5: 1}, {1: 1, 2: 2}, {4: 3}, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, {}])
def test_weight_gradients_of_few_groups_are_zero_everywhere_else(sizes: dict[int, int]) -> None:
    rows, groups = sum(sizes.values()), 6
    left, right = torch.randn(rows + 1, K), torch.randn(rows + 1, N)  # the last row is of no group
    out = torch.full((groups, K, N), torch.nan)
    loop.multiply_weights_of_runs(left, right, sizes, out)

    expert = torch.tensor([g for g, size in sizes.items() for _ in range(size)], dtype=torch.int64)
    of_group = torch.nn.functional.one_hot(expert, groups).float()
    torch.testing.assert_close(out, torch.einsum("tg,tk,tn->gkn", of_group, left[:rows], right[:rows]))
