"""The grouped_mm backend, which CUDA uses, run on CPU, where torch computes the same function more slowly."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product

import pytest
import torch
from host_reads import NoHostReads
from kernels_asked import grouped_mm_on_cpu
from reference import assert_as_good, assert_close_to, grouped_linear, run, unit
from test_grouped_mlp import Case

from fusible import Bias, GroupedLinear, RefusedError, Sequential, SwiGLU, config
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout
from fusible.ops.kernels.pytorch import grouped_mm, loop, wrong_sizes

E, K, N, T = 3, 16, 24, 40
SIZES = [15, 0, 20]
BF16 = torch.bfloat16
FACTORS = [None, 0.5, torch.tensor([0.5, 2.0, -1.0])]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    aligned = grouped_mm._misaligned
    monkeypatch.setattr(
        grouped_mm, "refusal", lambda p: aligned(p) if p.a.dtype == BF16 else f"needs bfloat16, got {p.a.dtype}"
    )
    monkeypatch.setattr(wrong_sizes, "_reports", {})
    with grouped_mm_on_cpu():
        yield


@contextmanager
def poisoned():
    """Fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(layout, out_dtype=torch.float32, sizes=SIZES, listed=False, **how):
    shapes = {"NT": ((E, N, K), (T, N)), "NN": ((E, K, N), (T, N)), "TN": ((T, N), (E, K, N))}[layout]
    a, b = unit(T, K, dtype=BF16, grad=False), unit(*shapes[0], dtype=BF16, grad=False)
    out = unit(*shapes[1], dtype=out_dtype, grad=False)
    if listed:
        b, out = (b, list(out)) if layout == "TN" else (list(b), out)
    return GroupedGemm(Layout[layout], a, b, torch.tensor(sizes), out, **how)


def copied(out):
    return [t.clone() for t in out] if isinstance(out, list) else out.clone()


def both(p):
    """The results that the two backends write into the same memory."""
    before, results = copied(p.out), []
    for backend in (grouped_mm, loop):
        for target, start in zip(p.out, before, strict=True):
            target.copy_(start)
        backend.run(p)
        results.append(tuple(copied(p.out)))
    return results


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(("alpha", "beta"), list(product(FACTORS, FACTORS)))
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_writes_what_the_loop_writes(layout, alpha, beta, listed):
    p = problem(layout, alpha=alpha, beta=beta, bias=unit(E, N, dtype=torch.float32, grad=False), listed=listed)

    torch.testing.assert_close(*both(p), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    "sizes", [[0, 0, 0], [40, 0, 0], [0, 0, 40], [30, 30, 30], [50, -3, 2], [1, 1, 1], [2**62] * 3]
)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_any_sizes(layout, sizes):
    torch.testing.assert_close(*both(problem(layout, sizes=sizes)), rtol=0.02, atol=0.05)


def test_scales_of_rows_and_of_the_bias():
    column = unit(T, dtype=torch.float32, grad=False)
    p = problem("NT", bias=list(unit(E, N, dtype=BF16, grad=False)), bias_scale=column, row_scale=column.flip(0))

    torch.testing.assert_close(*both(p), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("scale", [None, torch.linspace(-1, 2, T)])
@pytest.mark.parametrize("sizes", [SIZES, [0, 0, 0], [0, 40, 0], [50, -3, 2], [2**62] * 3])
def test_sums_and_dots_of_rows(sizes, scale):
    rows, vectors, sizes = unit(T, N, dtype=BF16, grad=False), unit(E, N, dtype=BF16, grad=False), torch.tensor(sizes)
    results = []
    for backend in (grouped_mm, loop):
        sums, dots, tail = torch.empty(E, N), torch.empty(T), torch.ones(T, N)
        backend.column_sums(rows, sizes, sums, scale)
        backend.row_dots(rows, vectors, sizes, dots)
        backend.zero_tail(tail, sizes)
        results.append((sums, dots, tail))

    torch.testing.assert_close(*results)


@pytest.mark.parametrize("how", [{}, {"bias": False}, {"scale_bias": True}, {"single_grouped_weight": False}])
def test_layer(how):
    op, dy = GroupedLinear(E, K, N, dtype=BF16, **how), unit(T, N, dtype=BF16)
    tensors = {"x": unit(T, K, dtype=BF16)} | (
        {"bias_scale": unit(T, dtype=torch.float32)} if "scale_bias" in how else {}
    )
    parameters = {"weight": [p for n, p in op.named_parameters() if "weight" in n], "bias": getattr(op, "bias", None)}
    parameters["weight"] = parameters["weight"][0] if len(parameters["weight"]) == 1 else parameters["weight"]
    got = run(lambda x, bias_scale=None: op(x, split_sizes=SIZES, bias_scale=bias_scale), tensors, dy)
    wide = {
        k: p.double() if isinstance(p, torch.Tensor) else p and [w.double() for w in p] for k, p in parameters.items()
    }

    def plain(x, **more):
        return grouped_linear(x, SIZES, **(wide if x.dtype == torch.float64 else parameters), **more)

    assert_as_good(got, plain, tensors, dy, rows=sum(SIZES))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("place", ["none", "before", "after", "both"])
def test_mlp(place, fused):
    case = Case(place=place, dtype=BF16, scaled=(True, True), scales_dtype=torch.float32)
    got = case.run(fused)

    assert "grouped_mm" in case.model.explain().steps[0].kernel
    assert_as_good(got, case.reference, case.tensors, case.dy, rows=sum(case.sizes))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_main_grad(dtype):
    op, x = GroupedLinear(E, K, N, dtype=BF16, accumulate_into_main_grad=True), unit(T, K, dtype=BF16)
    op.weight.main_grad = torch.full_like(op.weight, 0.5, dtype=dtype)
    dy = unit(T, N, dtype=BF16, grad=False)
    op(x, split_sizes=SIZES).backward(dy)
    plain, exact = (
        torch.autograd.grad(grouped_linear(x.to(wide), SIZES, weight := op.weight.to(wide)), weight, dy.to(wide))[0]
        for wide in (BF16, torch.float64)
    )

    assert_close_to(op.weight.main_grad, (0.5 + plain).to(dtype), 0.5 + exact)


def test_buffers_are_written_and_their_tails_left():
    op, x, out = GroupedLinear(E, K, N, dtype=BF16), unit(T, K, dtype=BF16), torch.full((T, N), -7.0, dtype=BF16)
    y = op(x, split_sizes=SIZES, output=out)

    assert y.data_ptr() == out.data_ptr()
    assert out[sum(SIZES) :].eq(-7).all()
    assert torch.equal(out[: sum(SIZES)], op(x, split_sizes=SIZES)[: sum(SIZES)])


@pytest.mark.parametrize(
    ("make", "kernel", "reason"),
    [
        # the tail of rows is zeroed on the device
        (lambda: GroupedLinear(E, 12, N, dtype=BF16), "loop + grouped_mm", "rows of a are not a multiple of 16 bytes"),
        (lambda: GroupedLinear(E, K, N), "loop + grouped_mm", "grouped_mm needs bfloat16, got torch.float32"),
    ],
)
def test_fallback_to_the_loop_says_why(make, kernel, reason):
    op = make()
    model = Sequential(op)
    model(unit(T, op.in_features, dtype=op.weight.dtype), split_sizes=SIZES)
    step = model.explain().steps[0]

    assert step.kernel == kernel
    assert reason in step.reason


def test_unaligned_start_of_rows_is_a_reason():
    rows = torch.zeros(T * K + 1, dtype=BF16)[1:].view(T, K)
    reason = grouped_mm._misaligned(GroupedGemm(Layout.NT, rows, rows.view(1, T, K), torch.tensor([T]), rows))

    assert reason == "a does not start at a multiple of 16 bytes"


def test_strided_columns_are_a_reason():
    rows = torch.zeros(T, 2 * K, dtype=BF16)[:, ::2]
    reason = grouped_mm._misaligned(GroupedGemm(Layout.NT, rows, rows[None], torch.tensor([T]), rows))

    assert reason == "a has no dimension of stride 1"


def test_the_backend_asked_for_is_used_or_refused():
    op = GroupedLinear(E, K, N)
    with (
        config(backend="grouped_mm"),
        pytest.raises(RefusedError, match=r"grouped_mm needs bfloat16, got torch.float32"),
    ):
        op(unit(T, K, dtype=torch.float32), split_sizes=SIZES)
    with config(backend="hopper"), pytest.raises(RefusedError, match="no backend for this grouped GEMM: hopper"):
        op(unit(T, K, dtype=torch.float32), split_sizes=SIZES)


@pytest.mark.parametrize("fused", [True, False])
def test_as_good_as_plain_torch_fused_or_not(fused):
    case = Case(place="before", dtype=BF16)

    assert_as_good(case.run(fused), case.reference, case.tensors, case.dy, rows=sum(case.sizes))


FEW_BITS = {  # every number and every step is exact in float32, and takes more bits than bfloat16 has
    "accumulate": {"beta": 1.0},
    "beta": {"beta": 0.75},
    "betas": {"beta": torch.tensor([0.75, 1.5, 0.375])},
    "alpha": {"alpha": 0.75, "beta": 1.0},
    "bias": {"bias": torch.randint(-255, 256, (E, N)).to(BF16) / 16, "beta": 0.75},
    "all": {
        "alpha": 0.75,
        "bias": torch.randint(-255, 256, (E, N)).to(BF16) / 16,
        "bias_scale": torch.full((T,), 0.75, dtype=BF16),
        "row_scale": torch.full((T,), 1.25, dtype=BF16),
        "beta": 0.75,
    },
}


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("backend", [grouped_mm, loop], ids=["grouped_mm", "loop"])
def test_what_is_added_to_the_product_is_rounded_with_it_once(backend, layout, name):
    how = dict(FEW_BITS[name])
    if layout == "TN":
        how.pop("row_scale", None), how.pop("bias_scale", None)
    p = problem(layout, BF16, **how)
    p.a.copy_(torch.randint(-1, 2, p.a.shape))
    p.b.copy_(torch.randint(-1, 2, p.b.shape))
    p.out.copy_(torch.randint(-255, 256, p.out.shape) / 16)
    exact = p.out.double()
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in how.items()}
    loop.run(GroupedGemm(p.layout, p.a.double(), p.b.double(), p.split_sizes, exact, **wide))
    backend.run(p)

    assert torch.equal(p.out, exact.to(BF16))


def test_training_follows_a_first_call_in_inference_mode():
    linear, x = GroupedLinear(E, K, N, dtype=BF16), unit(T, K, dtype=BF16)
    with config(backend="grouped_mm"):
        with torch.inference_mode():
            linear(x, split_sizes=torch.tensor(SIZES))
        linear(x, split_sizes=torch.tensor(SIZES)).sum().backward()

    assert linear.weight.grad is not None


def test_a_bias_behind_a_product_is_differentiated_again_and_without_the_tail():
    model = Sequential(GroupedLinear(E, K, 2 * N), Bias(2 * N), SwiGLU(), GroupedLinear(E, N, K)).to(BF16)
    x, dy = (unit(T, K, dtype=BF16, grad=False) for _ in range(2))
    for rows in (x, dy):
        rows[sum(SIZES) :] = torch.nan
    grads = []
    with config(backend="grouped_mm"), poisoned():
        y = model(x, split_sizes=torch.tensor(SIZES))
        for _ in range(2):
            grads += torch.autograd.grad(y, [model[1].bias], dy, retain_graph=True)
    with config(backend="loop"):
        grads += torch.autograd.grad(model(x, split_sizes=torch.tensor(SIZES)), [model[1].bias], dy)

    assert torch.equal(*grads[:2])
    torch.testing.assert_close(grads[0], grads[2], rtol=0.02, atol=0.1)


@pytest.mark.parametrize("how", [{}, {"single_grouped_weight": False}, {"bias": False}])
def test_nothing_waits_for_the_device(how):
    model = Sequential(GroupedLinear(E, K, 2 * N, dtype=BF16, **how), SwiGLU(), GroupedLinear(E, N, K, dtype=BF16))
    for sizes in (SIZES, [0, 40, 0]):
        x = unit(T, K, dtype=BF16)
        with NoHostReads():
            model(x, split_sizes=torch.tensor(sizes)).sum().backward()
