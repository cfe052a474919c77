"""The grouped_mm of torch on a CPU: the bits of the loop, where torch has one and it is faster."""

from __future__ import annotations

import pytest
import torch
from kernels_asked import runner
from reference import unit

from fusible import GroupedLinear, RefusedError, config
from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout
from fusible.ops.kernels.pytorch import few_rows, grouped_mm_cpu, loop
from fusible.ops.values.activation_spec import gated

E, K, N, T = 3, 16, 24, 40
SILU = gated("silu", None, 1.0, 0.0, "concat")


def rows(*shape, dtype=torch.float32):
    return unit(*shape, dtype=dtype, grad=False)


def problem(layout="NT", dtype=torch.float32, sizes=(15, 0, 20), **options):
    b, out = {"NT": ((E, N, K), (T, N)), "NN": ((E, K, N), (T, N)), "TN": ((T, N), (E, K, N))}[layout]
    sizes = torch.tensor(sizes)
    return GroupedGemm(
        Layout[layout],
        rows(T, K, dtype=dtype),
        rows(*b, dtype=dtype),
        sizes,
        torch.full(out, 7.0).to(dtype),
        **({"fresh": True} | options),
    )


def by_both(p, *others):
    """The results of each backend in ``out`` and the others, without the tail of rows."""
    end, results = loop.group_sizes(p.split_sizes, p.rows), []
    for backend in (grouped_mm_cpu, loop):
        assert backend.refusal(p) is None
        backend.run(p)
        results.append([(t if p.layout is Layout.TN else t[: sum(end)]).clone() for t in (p.out, *others)])
        p.out.fill_(7)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(15, 0, 20), (0, 40, 0), (0, 0, 0), (30, 30, 30), (50, -3, 2), (50, -10, 0), (2**62,) * 3]
)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_the_bits_of_the_loop(layout, sizes, dtype):
    ours, looped = by_both(problem(layout, dtype, sizes))

    assert torch.equal(*ours, *looped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_of_rows(dtype):
    ours, looped = by_both(problem(dtype=dtype, row_scale=rows(T)))

    assert torch.equal(*ours, *looped)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sizes", [(15, 0, 20), (0, 40, 0), (0, 0, 0), (30, 30, 30), (50, -3, 2)])
def test_a_bias(sizes, scaled):
    p = problem(sizes=sizes, bias=rows(E, N), row_scale=rows(T) if scaled else None)
    ours, looped = by_both(p)

    torch.testing.assert_close(ours, looped, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("few", [True, False])
def test_column_sums_and_dots_of_few_rows_and_of_many(few, monkeypatch):
    monkeypatch.setattr(few_rows, "are_few", lambda *of_rows: few)
    x, vectors, scale, sizes = rows(T, N), rows(E, N), rows(T), torch.tensor((15, 0, 20))
    groups = torch.tensor([0] * 15 + [2] * 20)
    truth = torch.zeros(E, N, dtype=torch.float64).index_add_(0, groups, (x * scale.unsqueeze(-1)).double()[:35])
    sums, dots = torch.full((E, N), torch.nan), torch.full((T,), torch.nan)
    x[35:] = scale[35:] = torch.nan
    loop.column_sums(x, sizes, sums, scale)
    loop.row_dots(x, vectors, sizes, dots)

    torch.testing.assert_close(sums.double(), truth, rtol=1e-5, atol=1e-5)
    expected = (x[:35].double() * vectors.double()[groups]).sum(-1)
    torch.testing.assert_close(dots[:35].double(), expected, rtol=1e-5, atol=1e-5)
    assert dots[35:].eq(0).all()


def test_rows_past_the_last_group_become_zero():
    p = problem()
    grouped_mm_cpu.run(p)

    assert p.out[35:].eq(0).all()


@pytest.mark.parametrize("keep", [True, False])
def test_an_activation_follows(keep):
    preact = torch.empty(T, N) if keep else None
    p = problem()
    p.out, p.epilogue = torch.empty(T, N // 2), Activate(SILU, rows(T), preact)
    ours, looped = by_both(p, *([preact] if keep else []))

    assert all(map(torch.equal, ours, looped))


def test_the_backward_of_an_activation_follows():
    p, preact = problem("NN"), rows(T, 2 * N)
    grads = ActivationGrads(torch.empty(T, 2 * N), torch.empty(T), torch.empty(T, N))
    p.out, p.epilogue = grads.preact, ActivateBackward(SILU, rows(T), preact, grads)
    ours, looped = by_both(p, grads.scales, grads.postact)

    assert all(map(torch.equal, ours, looped))


REFUSED = {
    "a buffer": ({"fresh": False}, "cannot write into a buffer"),
    "a bias in 16 bits": ({"dtype": torch.bfloat16, "bias": torch.ones(E, N)}, "must not be rounded to 16 bits"),
    "a factor": ({"alpha": 0.5}, "no factor except scales of rows"),
    "float64": ({"dtype": torch.float64}, "needs a CPU and 16 or 32 bits, got cpu and torch.float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_runs_in_the_loop(name):
    options, reason = REFUSED[name]
    p = problem(**options)

    assert reason in grouped_mm_cpu.refusal(p)
    assert runner(p) is loop.run


def test_rows_that_are_no_multiple_of_16_bytes_run_in_the_loop():
    p = problem()
    p.a, p.b = rows(T, K + 1), rows(E, N, K + 1)

    assert grouped_mm_cpu.refusal(p) == "needs dense rows of a multiple of 16 bytes"


def test_many_groups_without_rows_run_in_the_loop():
    sizes = torch.zeros(200, dtype=torch.int64)
    sizes[7] = T
    p = GroupedGemm(Layout.NT, rows(T, K), rows(200, N, K), sizes, torch.empty(T, N), fresh=True)

    assert "few groups that have rows" in grouped_mm_cpu.refusal(p)
    loop.run(p)
    torch.testing.assert_close(p.out, p.a @ p.b[7].mT)


def test_many_rows_before_an_activation_run_in_the_loop():
    p = problem()
    p.a, p.epilogue = rows(few_rows.FEW_BYTES // (4 * N) + 1, K), Activate(SILU, None, None)

    assert "from the cache" in grouped_mm_cpu.refusal(p)


def test_a_torch_without_it_loops(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    p = problem()

    assert "has no grouped_mm" in grouped_mm_cpu.refusal(p)
    assert runner(p) is loop.run


def test_the_backend_asked_for_runs_or_raises():
    op, x = GroupedLinear(E, K, N, bias=False), rows(T, K)
    with config(backend="grouped_mm"):
        y = op(x, split_sizes=[15, 0, 20])
        with pytest.raises(RefusedError, match="no backend for this grouped GEMM: grouped_mm gives memory of its own"):
            op(x, split_sizes=[15, 0, 20], output=torch.empty(T, N))
    with config(backend="loop"):
        assert torch.equal(y, op(x, split_sizes=[15, 0, 20]))
