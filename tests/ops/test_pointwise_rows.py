"""Pointwise kernels over rows on the emulated GPU (tests/emulation), launched one by one and replayed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulation import build, harness
from torch import Tensor

import fusible
from fusible import Pointwise, Sequential, interleaved
from fusible.fuser import replay
from fusible.ops.kernels.hopper import pointwise as jit
from fusible.ops.kernels.problems.gemm import PointwiseGrads, PointwiseRows
from fusible.ops.kernels.pytorch import pointwise as reference

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]
STEP = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BF16, FP32 = torch.bfloat16, torch.float32


def swiglu_of_a_row(gate: Tensor, up: Tensor, limit: float, s: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up * s


def gated(halves: Any = "concat", limit: float = 1.25) -> Pointwise:
    return Pointwise(swiglu_of_a_row, halves=halves, constants={"limit": limit})


def check(
    op: Pointwise, rows: int, columns: int, dtype: torch.dtype, numbers: torch.dtype = FP32, offset: int = 0
) -> None:
    """The kernels against PyTorch, which runs the same program; results stand in the middle of other memory."""
    program, arguments, count = op.program, len(op._x_inputs), len(op.keywords)
    assert program is not None
    x = torch.randn(rows * columns * arguments + offset).to(dtype)[offset:].view(rows, columns * arguments)
    given = torch.randn(count, rows).to(numbers) if count else None
    read = PointwiseRows(x, getattr(op.halves, "block", None), given, tuple(op.constants.values()))
    dy, step = torch.randn(rows, columns).to(dtype), STEP[dtype]
    around = [torch.full((rows + 2, n), 77.0, dtype=dtype) for n in (columns, columns * arguments)] * 2
    sums = [torch.full((count, rows), 77.0, dtype=numbers) if count else None for _ in range(2)]
    for kernels, y, dx, dnumbers in zip((jit, reference), around[::2], around[1::2], sums, strict=True):
        kernels.forward(program, read, y[1:-1])
        kernels.backward(program, read, dy, PointwiseGrads(dx[1:-1], dnumbers, None))
    for computed, expected in zip(around[:2], around[2:], strict=True):
        assert (computed[[0, -1]] == 77).all()
        torch.testing.assert_close(computed.float(), expected.float(), rtol=step, atol=step / 4)
    if count:
        assert sums[0] is not None
        assert sums[1] is not None
        torch.testing.assert_close(sums[0], sums[1], rtol=max(STEP[numbers], 1e-4), atol=1e-3)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("halves", ["concat", interleaved(1), interleaved(8)], ids=str)
def test_halves_and_types(halves, dtype):
    check(gated(halves), 11, 72, dtype)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (9, 8), (5, 600), (70, 24)])
def test_shapes(rows, columns):
    check(gated(), rows, columns, BF16)


def test_rows_that_are_not_aligned():
    check(gated(), 5, 64, BF16, offset=3)


@pytest.mark.parametrize("numbers", STEP, ids=str)
def test_types_of_numbers(numbers):
    check(gated(), 9, 40, BF16, numbers)


def test_several_numbers_and_constants():
    def function(x, a, s, t, b):
        return torch.tanh(x * s + a) * t - b

    check(Pointwise(function, constants={"b": 0.5, "a": -0.25}), 9, 40, torch.float16)


def shifted_swish(gate, up, s, alpha, beta):
    return gate * torch.sigmoid(beta * gate) * (up + alpha) * s


def check_columns(sizes, dtype, vectors, columns=40):
    """The kernels against PyTorch, which runs the same program."""
    rows, groups = 9, len(sizes or [0])
    op = Pointwise(shifted_swish, halves="concat", columns={"alpha": (groups, columns), "beta": (groups, columns)})
    split_sizes = None if sizes is None else torch.tensor(sizes, dtype=torch.int32 if groups == 3 else torch.int64)
    x, dy = torch.randn(rows, 2 * columns).to(dtype), torch.randn(rows, columns).to(dtype)
    numbers, both = torch.rand(1, rows), torch.randn(2, groups, columns).to(vectors)
    read, results = PointwiseRows(x, None, numbers, (), both, split_sizes), []
    for kernels in (jit, reference):
        y, out = torch.empty_like(dy), PointwiseGrads(*map(torch.empty_like, (x, numbers, both)))
        kernels.forward(op.program, read, y)
        kernels.backward(op.program, read, dy, out)
        results.append((y, *out[:3]))
    for computed, expected, step in zip(*results, [STEP[dtype]] * 2 + [1e-4, STEP[vectors]], strict=True):
        torch.testing.assert_close(computed, expected, rtol=step, atol=max(step / 4, 2e-5))


@pytest.mark.parametrize("vectors", STEP, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("sizes", [None, [4, 0, 5], [1, 2, 3], [9], [0] * 40 + [3, 0, 5]], ids=str)
def test_columns(sizes, dtype, vectors):
    check_columns(sizes, dtype, vectors)


@pytest.mark.parametrize("kernels", [jit, reference], ids=["jit", "torch"])
def test_a_tail_that_is_unspecified_counts_in_no_sum(kernels):
    program = Pointwise(lambda x, b: x * torch.tanh(b * x), columns={"b": (40,)}).program
    x, dy, vector = torch.randn(9, 40), torch.randn(9, 40), torch.randn(1, 40)
    results = []
    for rows in (9, 7):
        x[rows:] = torch.nan
        read = PointwiseRows(x[:rows], None, None, (), (vector,), None)
        if rows == 7:
            read = read._replace(x=x, split_sizes=torch.tensor([4, 3, 0]), tail_unspecified=True)
        out = PointwiseGrads(None, None, (torch.empty_like(vector),))
        kernels.backward(program, read, dy if rows == 7 else dy * (torch.arange(9) < 7).unsqueeze(1), out)
        results.append(out.vectors[0])
    torch.testing.assert_close(*results)


def test_columns_that_fit_no_vector():
    check_columns([4, 0, 3], BF16, FP32, columns=5)


def test_columns_in_calls_that_are_replayed():
    sizes, counted = torch.tensor([2, 0, 3]), []
    op = Pointwise(lambda x, beta: x * torch.sigmoid(beta * x), columns={"beta": torch.rand(3, 16).to(BF16)})
    with replay.simulated("cpu"):
        for rows in (6, 6, 6, 6, 9, 9, 5, 6):
            x, dy = torch.randn(rows, 16).to(BF16).requires_grad_(), torch.randn(rows, 16).to(BF16)
            before, results = replay.stats().replayed, []
            for each in (op, copy.deepcopy(op)):
                y = each(x, split_sizes=sizes)
                results.append([y.detach(), *torch.autograd.grad(y, [x, each.beta], dy)])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            counted.append(replay.stats().replayed - before)
    assert counted[0] == 0
    assert counted[-1] == 2, counted


class Calls:
    """A container of one function, its arguments, and what a call gives: the output and all gradients."""

    def __init__(self, op: Pointwise, numbers: torch.dtype = FP32) -> None:
        self.model: Any = Sequential(op)
        self.numbers = numbers

    def arguments(self, rows: int) -> list[Tensor]:
        x, s = torch.randn(rows, 32).to(BF16), torch.rand(rows).to(self.numbers)
        return [x.requires_grad_(), s.requires_grad_(), torch.randn(rows, 16).to(BF16)]

    def run(self, model: Sequential | Pointwise, x: Tensor, s: Tensor, dy: Tensor) -> list[Tensor]:
        y = model(x, s=s)
        return [y.detach(), *torch.autograd.grad(y, [x, s], dy)]

    def is_right(self, rows: int) -> bool:
        """Whether a call gives what a copy gives, which knows nothing of earlier calls."""
        arguments = self.arguments(rows)
        results = [self.run(model, *arguments) for model in (self.model, copy.deepcopy(self.model))]
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("alone", [False, True], ids=["container", "alone"])
@pytest.mark.parametrize("numbers", [FP32, BF16], ids=str)
def test_calls_are_replayed(numbers, alone):
    calls = Calls(gated(), numbers)
    calls.model = calls.model[0] if alone else calls.model
    with replay.simulated("cpu"):
        for _ in range(3):
            assert calls.is_right(6)
        before = replay.stats().replayed
        assert calls.is_right(6)
        assert replay.stats().replayed == before + 2  # forward and backward of the model; none of the copy
        for rows in (6, 9, 9, 12, 3, 7):
            assert calls.is_right(rows)


def test_another_constant_is_seen_by_replays():
    calls = Calls(gated())
    with replay.simulated("cpu"):
        for limit in (1.0, 0.25, 1.0):
            calls.model[0].constants = {"limit": limit}
            for _ in range(4):
                assert calls.is_right(6)
            x, s, _ = calls.arguments(6)
            gate, up = x.detach().float().chunk(2, -1)
            expected = swiglu_of_a_row(gate, up, limit, s.detach().float().unsqueeze(-1))
            torch.testing.assert_close(calls.model(x, s=s).float(), expected, rtol=2.0**-7, atol=2.0**-9)


def test_another_constant_compiles_nothing(emulation: harness.Emulation):
    op, x, s = gated(limit=2.0), torch.randn(4, 32).to(BF16), torch.rand(4)
    op(x, s=s)
    compiled = len(emulation.functions)
    op.constants = {"limit": 0.125}
    op(x, s=s)
    assert len(emulation.functions) == compiled


def test_the_extension_launches_what_it_is_told(emulation: harness.Emulation):
    x = torch.ones(2, 8, dtype=BF16)
    absent, operands = (
        ("dy", "dx", "sizes", "int64_sizes", "stream", "device"),
        ("numbers", "dnumbers", "vectors", "matrices"),
    )
    nothing: dict[str, Any] = dict.fromkeys(absent, 0) | {key: [] for key in (*operands, "dcolumns", "dmatrices")}
    sizes = {"rows": 2, "columns": 8, "block": 8, "groups": 1}
    with pytest.raises(RuntimeError, match="there is no compiled kernel"):
        emulation.pointwise(function=0, x=x.data_ptr(), y=x.data_ptr(), constants=(), **sizes, **nothing)
    with pytest.raises(RuntimeError, match="takes at most 16 constants, got 17"):
        emulation.pointwise(function=1, x=x.data_ptr(), y=x.data_ptr(), constants=(0.0,) * 17, **sizes, **nothing)
    nine = nothing | {"vectors": [0] * 9}
    with pytest.raises(RuntimeError, match="takes at most 8 numbers of a row, of a column and of an element, got 9"):
        emulation.pointwise(function=1, x=x.data_ptr(), y=x.data_ptr(), constants=(), **sizes, **nine)
    with pytest.raises(TypeError, match="constants: does not take"):
        emulation.pointwise(function=1, x=x.data_ptr(), y=x.data_ptr(), constants=[0.0], **sizes, **nothing)


def test_more_constants_than_kernels_take_run_by_pytorch():
    names = [f"c{i}" for i in range(17)]
    function = eval(f"lambda x, {', '.join(names)}: x * ({' + '.join(names)})")
    op = Pointwise(function, constants=dict.fromkeys(names, 1.0))
    assert op(torch.ones(2, 8, dtype=BF16)).eq(17).all()
    assert "takes at most 16 constants, got 17" in str(Sequential(op).explain(torch.ones(2, 8, dtype=BF16)))
    with fusible.config(strict=True), pytest.raises(fusible.RefusedError, match="16 constants"):
        op(torch.ones(2, 8, dtype=BF16))


class Several:
    """Calls of ops that read several numbers of rows, columns and elements, of several dtypes."""

    def __init__(self, model: Any, columns: int, frozen: tuple[str, ...] = ()) -> None:
        self.model, self.columns = model, columns
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)

    def run(self, model: Any, x: Tensor, rows: dict[str, Tensor], dy: Tensor) -> list[Tensor]:
        wanted = [x, *rows.values(), *[p for p in model.parameters() if p.requires_grad]]
        y = model(x, split_sizes=torch.tensor([2, 0, 3]), **rows)
        return [y.detach(), *torch.autograd.grad(y, wanted, dy)]

    def numbers(self, rows: int) -> dict[str, Tensor]:
        """The arguments of a call besides x and the split sizes."""
        shapes = {"s": (rows,), "t": (rows,), "h": (rows, 16), "k": (rows, 8)}
        numbers = {name: torch.rand(shapes[name]) for name in keywords_of(self.model) - {"split_sizes"}}
        return {name: each.to(BF16 if name in "th" else FP32).requires_grad_() for name, each in numbers.items()}

    def are_right(self, rows: int) -> bool:
        """Whether a call gives what a copy gives, which knows nothing of earlier calls."""
        x, dy = torch.randn(rows, 16).to(BF16).requires_grad_(), torch.randn(rows, self.columns).to(BF16)
        numbers = self.numbers(rows)
        results = [self.run(model, x, numbers, dy) for model in (self.model, copy.deepcopy(self.model))]
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def keywords_of(model: Any) -> set[str]:
    return {keyword for op in (model if isinstance(model, Sequential) else [model]) for keyword in op.keywords}


def several(kind: str) -> Several:
    """An op, or a chain, that reads several numbers of a row, of a column or of an element."""
    alpha, beta = torch.rand(3, 8).to(BF16), torch.rand(3, 8)
    if kind == "op":

        def function(gate: Tensor, up: Tensor, s: Tensor, t: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
            return F.silu(gate * s) * (up + t) * torch.cos(alpha) + beta

        return Several(Pointwise(function, halves="concat", columns={"alpha": alpha, "beta": beta}), 8)
    if kind.startswith("residuals"):  # biases of all rows too, and a matrix of gate and up
        halves = "concat" if kind == "residuals" else interleaved(2)
        ops = [fusible.AddExtraInput("h"), fusible.Bias(16), Pointwise(lambda x: torch.tanh(x)), fusible.Bias(16)]
        ops += [fusible.SwiGLU(layout=halves), fusible.AddExtraInput("k"), fusible.Activation("gelu")]
        of_groups = Pointwise(lambda x, alpha: x * alpha, columns={"alpha": alpha})
        return Several(Sequential(*ops, of_groups, fusible.Bias(8)), 8)
    first = Pointwise(lambda gate, up, s: F.silu(gate * s) * up, halves="concat")
    second = Pointwise(lambda x, t, alpha: torch.tanh(x * alpha) + t, columns={"alpha": alpha})
    third = Pointwise(lambda x, beta: x + beta, columns={"beta": beta})
    return Several(Sequential(first, fusible.ConstantScale(0.5), second, third), 8)


@pytest.mark.parametrize("kind", ["op", "chain", "residuals", "residuals between blocks"])
def test_several_numbers_are_read_where_they_lie_and_replayed(kind):
    calls = several(kind)
    with replay.simulated("cpu"):
        for _ in range(3):
            assert calls.are_right(6)
        before = replay.stats().replayed
        assert calls.are_right(6)
        assert replay.stats().replayed == before + 2
        for rows in (9, 9, 7, 6):
            assert calls.are_right(rows)
    if kind != "op":
        explained = str(calls.model.explain())
        assert "PointwiseChain  0 1 2 3" in explained
        assert "hopper (pointwise)" in explained


def biased(dtype: torch.dtype) -> Sequential:
    """The first bias has the gradient of x, the second one of its own, the last that of y."""
    ops = [fusible.Bias(16, dtype=dtype) for _ in range(3)]
    for op in ops:
        torch.nn.init.normal_(op.bias)
    return Sequential(ops[0], fusible.Activation("silu"), ops[1], fusible.ConstantScale(0.5), ops[2])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_biases_of_a_chain_are_replayed(dtype):
    model, counted = biased(dtype), []
    with replay.simulated("cpu"):
        for rows in (6, 6, 6, 6, 300, 300, 5):
            x, dy = torch.randn(rows, 16).to(BF16).requires_grad_(), torch.randn(rows, 16).to(BF16)
            before, results = replay.stats().replayed, []
            for each in (model, copy.deepcopy(model)):
                y = each(x)
                results.append([y.detach(), *torch.autograd.grad(y, [x, *each.parameters()], dy)])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            counted.append(replay.stats().replayed - before)
            with fusible.config(backend="loop"):
                y = model(x)
                theirs = [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]
            for computed, expected in zip(results[0], theirs, strict=True):
                size = max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(computed, expected, rtol=2.0**-6, atol=2.0**-6 * size)
    assert counted[-1] == 2, counted


@pytest.mark.parametrize("kind", ["op", "chain", "residuals", "residuals between blocks"])
def test_several_numbers_are_those_of_pytorch(kind):
    torch.manual_seed(2)
    calls, x, dy = several(kind), torch.randn(7, 16).to(BF16).requires_grad_(), torch.randn(7, 8).to(BF16)
    numbers = calls.numbers(7)
    ours = calls.run(calls.model, x, numbers, dy)
    with fusible.config(backend="loop"):
        theirs = calls.run(calls.model, x, numbers, dy)
    for computed, expected in zip(ours, theirs, strict=True):
        assert computed.dtype == expected.dtype
        torch.testing.assert_close(computed, expected, rtol=2.0**-6, atol=2.0**-6)


def test_a_gradient_that_is_that_of_the_result_launches_nothing(monkeypatch):
    model, launched, launch = Sequential(fusible.Activation("silu"), fusible.AddExtraInput("k")), [], jit._launch
    monkeypatch.setattr(jit, "_launch", lambda direction, *rest: launched.append(direction) or launch(direction, *rest))
    x, k, dy = torch.randn(5, 16).to(BF16), torch.randn(5, 16).to(BF16).requires_grad_(), torch.randn(5, 16).to(BF16)
    (dk,) = torch.autograd.grad(model(x, k=k), k, dy)
    assert torch.equal(dk, dy)
    assert launched == ["forward"]


def affine(columns: int, dtype: torch.dtype) -> list[fusible.Op]:
    """Ops that only add and multiply; sums stand before products, so that no product and sum are one instruction."""
    return [
        fusible.AddExtraInput("h"),
        fusible.Bias(columns, dtype=dtype),
        fusible.Scale(),
        fusible.ConstantScale(0.75),
    ]


@pytest.mark.parametrize("columns", [40, 7])
@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_chains_that_only_add_and_multiply(dtype, columns):
    """One kernel each way, replayed; in float32 with the bits of the ops."""
    model, h, s = Sequential(*affine(columns, dtype)), torch.randn(9, columns).to(dtype), torch.rand(9)
    torch.nn.init.normal_(model[1].bias)
    x, dy = torch.randn(9, columns).to(dtype), torch.randn(9, columns).to(dtype)
    leaves = [each.requires_grad_() for each in (x, h, s)]

    def step() -> list[Tensor]:
        y = model(x, h=h, scales=s)
        return [y.detach(), *torch.autograd.grad(y, [*leaves, model[1].bias], dy)]

    with fusible.config(disable_fusions={"PointwiseChain"}):
        apart = step()
    with replay.simulated("cpu"):
        fused = [step() for _ in range(4)]
        assert "hopper (pointwise)" in str(model.explain())
    assert all(torch.equal(*pair) for pair in zip(fused[0], fused[-1], strict=True))
    for name, ours, theirs in zip(["y", "x", "h", "s", "bias"], fused[0], apart, strict=True):
        if dtype == FP32 and name in ("y", "x", "h"):
            assert torch.equal(ours, theirs), name
        size = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * STEP[dtype] * size)
