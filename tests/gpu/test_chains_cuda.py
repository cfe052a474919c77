"""Chains of pointwise ops on a GPU: one kernel forward and backward, replayed, or in an epilogue."""

from __future__ import annotations

import pytest
import torch

from fusible import (
    Activation,
    AddExtraInput,
    Bias,
    ConstantScale,
    GroupedLinear,
    Pointwise,
    Scale,
    Sequential,
    SwiGLU,
    config,
)
from fusible.fuser import replay
from fusible.ops.kernels import extension

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LINEARS = {"GroupedLinearGLU", "GroupedLinearResidual", "GroupedLinearChain"}
UNFUSED = {"PointwiseChain", "GLUScale", "GroupedMLP", *LINEARS}
STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
needs_extension = pytest.mark.skipif(not extension.is_built(), reason="the extension is not built")


def chain(kind, dtype, columns=64):
    """A chain, and the width of its input."""
    if kind == "dense":
        ops = [Bias(2 * columns), SwiGLU(), ConstantScale(0.5), Bias(columns), Activation("gelu"), Scale()]
        return Sequential(*ops).to("cuda", dtype), 2 * columns
    if kind == "affine":
        return Sequential(AddExtraInput("h"), Bias(columns), Scale(), ConstantScale(0.5)).to("cuda", dtype), columns
    if kind == "residuals":  # biases of all rows too, and a matrix of gate and up
        ops = [AddExtraInput("h"), Bias(2 * columns), SwiGLU(), AddExtraInput("k"), Activation("gelu"), Bias(columns)]
        return Sequential(*ops, Pointwise(lambda x, a: x * a, columns={"a": torch.rand(3, columns)})).to(
            "cuda", dtype
        ), 2 * columns
    first = Pointwise(lambda x, s: torch.tanh(x * s))
    second = Pointwise(lambda x, beta: x * torch.sigmoid(beta * x), columns={"beta": torch.rand(3, columns)})
    third = Pointwise(lambda x, alpha: x + alpha, columns={"alpha": torch.rand(3, columns)})
    return Sequential(first, Scale(), second, third).to("cuda", dtype), columns


def call(model, width, rows, dtype, seed=0, fused=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to("cuda", dtype).requires_grad_()
    keywords = {}
    for op in model:
        for name in op.keywords:
            if name == "split_sizes":
                keywords[name] = torch.tensor([rows // 2, 0, rows // 3], device="cuda")
            elif isinstance(op, AddExtraInput):
                matrix = torch.randn(rows, width // (1 if name == "h" else 2), generator=generator)
                keywords[name] = matrix.to("cuda", torch.float32 if name == "h" else dtype).requires_grad_()
            else:
                keywords.setdefault(name, torch.rand(rows, generator=generator).cuda().requires_grad_())
    wanted = [x, *[k for k in keywords.values() if k.requires_grad], *model.parameters()]
    with config(disable_fusions=set() if fused else UNFUSED):
        y = model(x, **keywords)
        dy = torch.randn(y.shape, generator=generator).to("cuda", dtype)
        return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def assert_close(fused, apart, dtype):
    for got, expected in zip(fused, apart, strict=True):
        assert got.dtype == expected.dtype
        size = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(got, expected, rtol=STEP[dtype], atol=STEP[dtype] * size)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("kind", ["dense", "groups", "residuals", "affine"])
def test_a_chain_is_its_parts(kind, dtype):
    model, width = chain(kind, dtype)
    torch.nn.init.normal_(next(model.parameters()))
    assert_close(call(model, width, 500, dtype), call(model, width, 500, dtype, fused=False), dtype)
    call(model, width, 500, dtype)
    explained = str(model.explain())
    assert "PointwiseChain" in explained
    assert "hopper (pointwise)" in explained


@needs_extension
@pytest.mark.parametrize("kind", ["dense", "groups", "residuals", "affine"])
def test_chains_are_replayed(kind):
    model, width = chain(kind, torch.bfloat16)
    expected = [call(chain_of_same(model, kind), width, rows, torch.bfloat16, rows) for rows in (64, 33)]
    for _ in range(3):
        for rows in (64, 33):
            call(model, width, rows, torch.bfloat16, rows)
    before = replay.stats().replayed
    for rows, truth in zip((64, 33), expected, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(call(model, width, rows, torch.bfloat16, rows), truth, strict=True)
        )
    assert replay.stats().replayed >= before + 2  # those that PyTorch sums over all rows only forward


def chain_of_same(model, kind):
    other, _ = chain(kind, torch.bfloat16)
    other.load_state_dict(model.state_dict())
    return other


def test_float64_runs_part_by_part():
    model, width = chain("dense", torch.float64)
    fused, apart = (call(model, width, 9, torch.float64, fused=each) for each in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(fused, apart, strict=True))


@needs_extension
@pytest.mark.parametrize("kind", ["scales", "columns"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_chain_in_the_epilogue(dtype, kind):
    experts, sizes, rows = 4, [70, 0, 130, 56], 256
    ops = [SwiGLU(), Pointwise(lambda x: 3 * torch.tanh(x / 3)), ConstantScale(0.5), Scale()]
    if kind == "columns":
        slope = Pointwise(lambda x, a: x * torch.sigmoid(a * x), columns={"a": torch.rand(experts, 256)})
        ops = [Bias(256), slope, SwiGLU(), Bias(128), Scale()]
        ops = [op.to("cuda", dtype) for op in ops]
    options = {"dtype": dtype, "device": "cuda", "bias": False}
    model = Sequential(GroupedLinear(experts, 128, 256, **options), *ops, GroupedLinear(experts, 128, 128, **options))
    x = torch.randn(rows, 128, device="cuda").to(dtype).requires_grad_()
    scales, dy = torch.rand(rows, device="cuda", requires_grad=True), torch.randn(rows, 128, device="cuda").to(dtype)
    results = []
    for disabled in (UNFUSED, set()):
        with config(disable_fusions=disabled):
            y = model(x, split_sizes=torch.tensor(sizes, device="cuda"), scales=scales)
            results.append([y.detach(), *torch.autograd.grad(y, [x, scales, *model.parameters()], dy)])
    assert_close(results[1], results[0], torch.bfloat16)
    explained = str(model.explain())
    assert "GroupedMLP" in explained
    if torch.cuda.get_device_capability()[0] == 9:
        assert "function" in explained


@needs_extension
@pytest.mark.parametrize("kind", ["behind the gate", "before the gate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_residual_in_the_epilogue(dtype, kind):
    experts, sizes, rows, behind = 4, torch.tensor([70, 0, 130, 56], device="cuda"), 256, kind == "behind the gate"
    ops = [SwiGLU(), Scale(), AddExtraInput(), Activation("silu")] if behind else [AddExtraInput(), SwiGLU(), Bias(128)]
    linear = GroupedLinear(experts, 128, 256, dtype=dtype, device="cuda")
    model = Sequential(linear, *[op.to("cuda", dtype) for op in ops])
    x = torch.randn(rows, 128, device="cuda").to(dtype).requires_grad_()
    extra = torch.randn(rows, 128 if behind else 256, device="cuda").to(dtype).requires_grad_()
    scales, dy = torch.rand(rows, device="cuda", requires_grad=True), torch.randn(rows, 128, device="cuda").to(dtype)
    tensors = [x, extra, *([scales] if behind else []), *model.parameters()]
    keywords = {"split_sizes": sizes, "extra": extra, **({"scales": scales} if behind else {})}

    def step():
        y = model(x, **keywords)
        return [y.detach(), *torch.autograd.grad(y, tensors, dy)]

    with config(disable_fusions=UNFUSED):
        apart = step()
    fused = step()
    assert_close(fused, apart, torch.bfloat16)
    explained = str(model.explain())
    assert "GroupedLinearResidual" in explained
    if torch.cuda.get_device_capability()[0] == 9:
        assert "in the epilogue" in explained
        again = [step() for _ in range(3)][-1]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, fused, strict=True))


AFFINE = {
    "GroupedLinearChain": lambda: [ConstantScale(0.5), Scale()],
    "GroupedLinearResidual": lambda: [AddExtraInput(), Scale(), GroupedLinear(4, 256, 128)],
    "GroupedMLP": lambda: [Bias(256), Scale(), ConstantScale(0.5), GroupedLinear(4, 256, 128)],
}


@needs_extension
@pytest.mark.parametrize("fusion", AFFINE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_chain_that_only_adds_and_multiplies_in_the_epilogue(dtype, fusion):
    """With NaN in rows past the last group, an empty group, and again as a replay."""
    sizes, rows = torch.tensor([70, 0, 130, 40], device="cuda"), 256
    model = Sequential(GroupedLinear(4, 128, 256), *AFFINE[fusion]()).to("cuda", dtype)
    x, scales = torch.randn(rows, 128, device="cuda").to(dtype), torch.rand(rows, device="cuda", requires_grad=True)
    x[240:] = torch.nan
    extra = torch.randn(rows, 256, device="cuda").to(dtype).requires_grad_()
    has_extra = any(isinstance(op, AddExtraInput) for op in model)
    leaves = [x.requires_grad_(), scales, *([extra] if has_extra else []), *model.parameters()]
    keywords = {"split_sizes": sizes, "scales": scales, **({"extra": extra} if has_extra else {})}
    dy = torch.randn(240, 256 if fusion == "GroupedLinearChain" else 128, device="cuda").to(dtype)

    def step():
        y = model(x, **keywords)[:240]
        grads = torch.autograd.grad(y, leaves, dy)
        return [y.detach(), *[grad[:240] if grad.shape[:1] == (rows,) else grad for grad in grads]]

    with config(disable_fusions=UNFUSED):
        apart = step()
    fused = [step() for _ in range(4)]
    assert_close(fused[0], apart, torch.bfloat16)
    assert fusion in str(model.explain())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused[0], fused[-1], strict=True))


def test_nothing_runs_without_rows():
    model, width = chain("groups", torch.bfloat16)
    assert call(model, width, 0, torch.bfloat16)[0].shape == (0, 64)
