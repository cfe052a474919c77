"""Pointwise functions on a GPU: one kernel forward and one backward, compiled when they are first called."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from test_pointwise import FUNCTIONS, by_autograd

import fusible
from fusible import Pointwise, interleaved
from fusible.fuser import replay
from fusible.ops.kernels.extension import is_built
from fusible.ops.kernels.hopper import pointwise as jit
from fusible.ops.kernels.jit.cache import kernel_cache
from fusible.ops.kernels.problems.gemm import PointwiseRows

pytestmark = pytest.mark.cuda
needs_extension = pytest.mark.skipif(not is_built(), reason="needs the extension")
STEP = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSIBLE_CACHE_DIR", str(tmp_path))
    kernel_cache.cache_clear()
    yield
    kernel_cache.cache_clear()


def check(function, gated, rows, columns, dtype, halves="concat"):
    op = Pointwise(function, halves=halves if gated == 2 else None)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(rows, columns * gated, generator=generator) * 2).to("cuda", dtype).requires_grad_()
    numbers = {name: torch.randn(rows, generator=generator).cuda().requires_grad_() for name in op.keywords}
    dy = torch.randn(rows, columns, generator=generator).to("cuda", dtype)
    y = op(x, **numbers)
    leaves = [x, *numbers.values()]
    grads = torch.autograd.grad(y, leaves, dy, materialize_grads=True)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parts = fusible.ops.programs.halves.split(
        wide[0], gated, op.halves.block if isinstance(op.halves, type(interleaved(1))) else None
    )
    truth = function(*[part.flatten(-2) * 1.0 for part in parts], *[t.unsqueeze(-1) for t in wide[1:]])
    expected = [torch.zeros_like(t) for t in wide]
    if truth.requires_grad:
        expected = torch.autograd.grad(truth, wide, dy.double(), materialize_grads=True)
    if function is FUNCTIONS["rounding trick"][0]:
        truth = torch.round(wide[0])
    assert y.dtype == dtype
    step = STEP[dtype]
    torch.testing.assert_close(y.double(), truth.detach(), rtol=step, atol=max(step / 8, 2e-5))
    torch.testing.assert_close(grads[0].double(), expected[0], rtol=step, atol=max(step / 8, 5e-5))
    for grad, by_row in zip(grads[1:], expected[1:], strict=True):
        torch.testing.assert_close(grad.double(), by_row, rtol=1e-4, atol=1e-4 * columns**0.5 * 4)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_compute_the_function(name, dtype):
    check(*FUNCTIONS[name], 33, 264, dtype)


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 7), (0, 16), (5, 4096), (4097, 24), (70000, 8)])
def test_shapes(shape):
    check(lambda x, s: torch.tanh(x) * s, 1, *shape, torch.bfloat16)


@pytest.mark.parametrize("halves", ["concat", interleaved(1), interleaved(4), interleaved(32)])
def test_halves(halves):
    check(lambda gate, up, s: F.silu(gate) * up * s, 2, 65, 128, torch.bfloat16, halves)


def test_memory_around_the_results_is_untouched():
    program = Pointwise(lambda x, s: x.exp() * s).program
    x = torch.randn(9, 40, device="cuda", dtype=torch.bfloat16)
    numbers = torch.randn(1, 9, device="cuda")
    out = torch.full((11, 40), 77.0, device="cuda", dtype=torch.bfloat16)
    jit.forward(program, PointwiseRows(x, None, numbers), out[1:10])
    assert (out[0] == 77).all()
    assert (out[10] == 77).all()
    torch.testing.assert_close(out[1:10], (x.float().exp() * numbers[0, :, None]).bfloat16())


@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_edges_differ_from_pytorch_in_16_bits_alone(dtype):
    """As docs/pointwise.md says."""
    weighted = Pointwise(lambda x, s: x * torch.sigmoid(s))
    x, s = torch.full((3, 16), torch.inf, device="cuda", dtype=dtype), torch.tensor([-88.0, -80.0, 0.0], device="cuda")
    found = weighted(x, s=s)
    assert found[1:].isinf().all()
    assert found[0].isinf().all() if dtype == torch.float32 else found[0].isnan().all()
    large = -1e18 if dtype != torch.float16 else -3e4
    y = Pointwise(lambda x: x * (1 + x / torch.sqrt(1 + x * x)))(torch.full((3, 16), large, device="cuda", dtype=dtype))
    assert (y.abs() <= (0 if dtype == torch.float32 else 2.0**-18 * -large)).all()


def test_rows_with_nan_stay_alone():
    op = Pointwise(lambda x, s: torch.sigmoid(x) * s)
    x = torch.randn(6, 32, device="cuda")
    x[2] = torch.nan
    x.requires_grad_()
    s = torch.rand(6, device="cuda", requires_grad=True)
    op(x, s=s).sum().backward()
    for grad in (x.grad, s.grad):
        assert grad[2].isnan().all()
        assert not grad[torch.tensor([0, 1, 3, 4, 5])].isnan().any()


def test_explain_names_the_kernel_and_why_not():
    model = fusible.Sequential(Pointwise(lambda x: torch.relu(x) ** 2))
    x = torch.randn(4, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert "hopper (pointwise)" in str(model.explain(x))
    assert "computes no float64" in str(model.explain(x.detach().double()))
    with fusible.config(backend="loop"):
        assert "hopper (pointwise)" not in str(model.explain(x))


@pytest.mark.hopper
def test_a_kernel_is_compiled_once(caplog):
    op = Pointwise(lambda x: torch.cos(x) * 1.2345)
    x = torch.randn(4, 8, device="cuda")
    with caplog.at_level(logging.INFO, "fusible"):
        op(x)
        op(x)
        Pointwise(lambda t: 1.2345 * torch.cos(t))(x)
    assert len(kernel_cache().sizes()) == 1


@pytest.mark.hopper
def test_graphs_replay_what_was_called_before():
    op = Pointwise(lambda x, s: torch.sin(x) * s + 0.321)
    x, s = torch.randn(16, 64, device="cuda"), torch.rand(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add(1)  # a capture without a kernel warns
        with pytest.raises(RuntimeError, match="call it once before the capture"):
            op(x, s=s)
    op(x, s=s)
    with torch.cuda.graph(graph):
        y = op(x, s=s)
    x.copy_(torch.randn(16, 64))
    graph.replay()
    torch.testing.assert_close(y, torch.sin(x) * s[:, None] + 0.321)


def test_compiled_code_calls_the_kernels():
    model = fusible.Sequential(Pointwise(lambda x, s: F.silu(x) * s))
    x = torch.randn(8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    s = torch.rand(8, device="cuda", requires_grad=True)
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        y = run(x, s=s)
        results.append((y, *torch.autograd.grad(y.float().sum(), [x, s])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_eager_and_reference_agree_on_special_values():
    op = Pointwise(FUNCTIONS["gpt-oss"][0], halves="concat")
    x = torch.tensor([[0.0, -0.0, 7.0, -7.0, 88.0, -104.0, 1e4, -1e4]] * 2, device="cuda").repeat(1, 2).requires_grad_()
    y = op(x, r=torch.ones(2, device="cuda"))
    expected, _ = by_autograd(FUNCTIONS["gpt-oss"][0], 2, x, {"r": torch.ones(2, device="cuda")})
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


def clamped(gate, up, limit, s):
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * s


def step(op, rows=64, numbers=torch.float32, dtype=torch.bfloat16):
    """Output and gradients for inputs of a seed."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).to("cuda", dtype).requires_grad_()
    s = torch.rand(rows, generator=generator).to("cuda", numbers).requires_grad_()
    y = op(x, s=s)
    return [y.detach(), *torch.autograd.grad(y, [x, s], torch.ones_like(y))]


@needs_extension
@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16], ids=str)
def test_a_function_alone_is_replayed(numbers):
    op = Pointwise(clamped, halves="concat", constants={"limit": 0.75})
    expected = {
        rows: step(Pointwise(clamped, halves="concat", constants={"limit": 0.75}), rows, numbers) for rows in (64, 33)
    }
    for _ in range(4):
        for rows in (64, 33):
            step(op, rows, numbers)
    before = replay.stats().replayed
    for rows in (64, 33):
        results = step(op, rows, numbers)
        assert all(torch.equal(a, b) for a, b in zip(results, expected[rows], strict=True))
    assert replay.stats().replayed == before + 4


@pytest.mark.hopper
def test_another_constant_compiles_nothing():
    op, counts = Pointwise(clamped, halves="concat", constants={"limit": 0.75}), []
    for limit in (0.75, 1.5, 0.25):
        op.constants = {"limit": limit}
        for _ in range(4):
            results = step(op)
        counts.append(len(kernel_cache().sizes()))
        right = step(Pointwise(lambda g, u, s: clamped(g, u, limit, s), halves="concat"))  # noqa: B023
        for computed, expected in zip(results, right, strict=True):
            torch.testing.assert_close(computed, expected, rtol=2.0**-8, atol=1e-5)
    assert counts == [counts[0], counts[0] + 2, counts[0] + 4]  # those of functions whose limit is in their code


@needs_extension
def test_the_driver_launches_what_the_extension_does(monkeypatch):
    op = Pointwise(clamped, halves=interleaved(8), constants={"limit": 0.75})
    with_extension = [step(op, rows, numbers) for rows in (1, 70000) for numbers in STEP]
    monkeypatch.setattr(jit, "is_built", lambda: False)
    other = copy.deepcopy(op)
    alone = [step(other, rows, numbers) for rows in (1, 70000) for numbers in STEP]
    for first, second in zip(with_extension, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_that_are_not_aligned():
    op = Pointwise(clamped, halves="concat", constants={"limit": 0.75})
    memory, s = torch.randn(9 * 96 + 1, device="cuda").bfloat16(), torch.rand(9, device="cuda")
    x = memory[1:].view(9, 96)
    assert torch.equal(op(x, s=s), op(x.clone(), s=s))


@needs_extension
def test_graphs_of_replayed_calls():
    op = Pointwise(clamped, halves="concat", constants={"limit": 0.75})
    x, s = torch.randn(64, 96, device="cuda").bfloat16(), torch.rand(64, device="cuda")
    for _ in range(4):
        op(x, s=s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, s=s)
    x.copy_(torch.randn(64, 96))
    graph.replay()
    assert torch.equal(y, op(x, s=s))


@pytest.mark.parametrize("vectors", STEP, ids=str)
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("sizes", [None, [700, 0, 300], [1, 0, 5], [3, 0] * 40 + [500]], ids=lambda s: str(s)[:12])
def test_columns(sizes, dtype, vectors):
    """Against PyTorch, which runs the same program."""
    groups = len(sizes or [0])
    start = {name: torch.randn(groups, 72, device="cuda").to(vectors) for name in ("alpha", "beta")}
    op = Pointwise(
        lambda x, alpha, beta: x * torch.sigmoid(beta * x) + alpha,
        columns=start if sizes else {n: t[0] for n, t in start.items()},
    )
    x = torch.randn(1001, 72, device="cuda").to(dtype).requires_grad_()
    dy, results = torch.randn_like(x), []
    keywords = {} if sizes is None else {"split_sizes": torch.tensor(sizes, device="cuda")}
    for backend in ("auto", "loop"):
        with fusible.config(backend=backend):
            y = op(x, **keywords)
            results.append([y.detach(), *torch.autograd.grad(y, [x, op.alpha, op.beta], dy)])
    steps = [STEP[dtype]] * 2 + [max(STEP[vectors], 1e-4)] * 2
    for computed, expected, step in zip(
        *results, steps, strict=True
    ):  # each side is rounded: one unit in the last place
        torch.testing.assert_close(computed, expected, rtol=2 * step, atol=max(step / 4, 2e-4))


@needs_extension
def test_columns_are_replayed():
    op = Pointwise(lambda x, beta: x * torch.sigmoid(beta * x), columns={"beta": torch.rand(3, 64).cuda()})
    x, sizes = torch.randn(50, 64, device="cuda").bfloat16().requires_grad_(), torch.tensor([20, 0, 25], device="cuda")
    results = []
    for _ in range(4):
        before = replay.stats().replayed
        y = op(x, split_sizes=sizes)
        results.append([y.detach(), *torch.autograd.grad(y, [x, op.beta], torch.ones_like(y))])
    assert replay.stats().replayed == before + 2
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))
