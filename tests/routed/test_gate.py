"""The product of a router's gate: float32 in PyTorch's operations, and by our own kernels on the emulation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checks.gate import BF16, SIZES, check, check_alone, step, tensors
from emulation import build

from fusible import Router, config
from fusible.ops.kernels.hopper import gate as kernel
from fusible.ops.kernels.problems.gate import GateProduct
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.routed.gate import Gate

emulated = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Layout]]:
    """Our own kernels, asked for by name: the products that they ran."""
    layouts, launch = list[Layout](), kernel.gemm.launch
    monkeypatch.setattr(kernel.gemm, "launch", lambda p: (layouts.append(p.layout), launch(p)))
    with config(backend="hopper"):
        yield layouts


class TestKernels:
    pytestmark = emulated

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_products_are_those_of_float64(self, sizes: tuple[int, int, int], launched: list[Layout]) -> None:
        check("cpu", sizes)
        fits = sizes[2] % 8 == 0

        assert launched == ([Layout.NT, *[Layout.NN] * 2, *[Layout.TN] * 2] if fits else [])

    def test_the_logits_of_a_token_depend_on_no_other(self, launched: list[Layout]) -> None:
        check_alone("cpu")
        assert launched == [Layout.NT] * 5

    def test_a_router_uses_it(self, launched: list[Layout]) -> None:
        router, x = Router(64, 16, 2, dtype=BF16, bias=True), torch.randn(9, 64, dtype=BF16)
        routes = router(x)
        routes.top_k_weights.square().sum().backward()
        with config(backend="loop"):
            expected = router(x)

        assert launched == [Layout.NT, Layout.TN, Layout.TN]
        torch.testing.assert_close(routes.logits, expected.logits)

    def test_gradients_that_are_not_finite_stay_where_they_are(self, launched: list[Layout]) -> None:
        x, weight, bias, dy = tensors("cpu", 5, 64, 8)
        dy[1, 3], dy[2, 4] = torch.inf, torch.nan
        logits = Gate()(x, weight=weight, logit_bias=bias)
        (dx,) = torch.autograd.grad(logits, [x], dy)

        assert dx[[0, 3, 4]].isfinite().all()
        assert dx[2].isnan().all()
        assert torch.equal(dx[1], torch.inf * weight[3].detach().sign())

    @pytest.mark.parametrize(
        ("a", "b", "why"),
        [
            ((4096, 64, BF16), (8, 64, torch.float32), "needs tokens and a weight of bfloat16, got torch.bfloat16 and"),
            ((4096, 64, torch.float32), (8, 64, BF16), "needs tokens of bfloat16, got torch.float32"),
            ((4096, 60, BF16), (8, 60, BF16), "needs features that are multiples of 8, got 60 and 8"),
            ((4095, 64, BF16), (8, 64, BF16), "begins at 4096 tokens"),
        ],
    )
    def test_refusals(self, a: tuple[int, int, torch.dtype], b: tuple[int, int, torch.dtype], why: str) -> None:
        operands = (torch.zeros(rows, columns, dtype=dtype) for rows, columns, dtype in (a, b))
        refused = kernel.refusal(GateProduct(Layout.NT, *operands, None))

        assert refused is not None
        assert why in refused


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
def test_pytorch_computes_in_float32_at_least(dtype: torch.dtype) -> None:
    x, weight, bias, dy = (t.detach().to(dtype).requires_grad_() for t in tensors("cpu", 9, 20, 12))
    ours = step(x, weight, bias, dy.detach())
    wide = torch.promote_types(dtype, torch.float32)
    logits = torch.nn.functional.linear(x.to(wide), weight.to(wide), bias.to(wide))
    expected = [logits, *torch.autograd.grad(logits, [x, weight], dy.detach().to(wide))]

    for out, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(out, right)


def test_no_tokens() -> None:
    x, weight, bias, dy = tensors("cpu", 0, 16, 8)

    assert [tuple(t.shape) for t in step(x, weight, bias, dy)] == [(0, 8), (0, 16), (8, 16)]
    assert not step(x, weight, bias, dy)[2].any()


class Labelled(torch.nn.Module):
    """A gate that is called as a module."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.inner = gate

    def forward(self, x: torch.Tensor, **keywords: object) -> torch.Tensor:
        logits: torch.Tensor = self.inner(x, **keywords)
        return logits


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, torch.float32), (torch.float64, torch.float64)], ids=str)
@pytest.mark.parametrize("frozen", ["", "x", "weight", "bias"])
def test_few_tokens_of_a_router_have_the_bits_of_the_op(
    tokens: int, dtypes: tuple[torch.dtype, torch.dtype], frozen: str
) -> None:
    torch.manual_seed(0)
    router, x = Router(64, 16, 2, dtype=dtypes[1], bias=True), torch.randn(tokens, 64, dtype=dtypes[0])
    leaves = {"x": x, "weight": router.weight, "bias": router.bias}
    results = []
    for gate in (router.gate, Labelled(router.gate)):
        router.gate = gate  # type: ignore[assignment]
        for name, leaf in leaves.items():
            leaf.requires_grad_(name != frozen)  # type: ignore[union-attr]
        routes = router(x)
        wanted = [leaf for name, leaf in leaves.items() if name != frozen]
        with torch.autocast("cpu", torch.bfloat16):
            grads = torch.autograd.grad(routes.logits.sin().sum() + routes.top_k_weights.sum(), wanted)  # type: ignore[arg-type]
        results.append([routes.logits, *grads])

    assert all(torch.equal(ours, ops) for ours, ops in zip(*results, strict=True))


def test_hooks_of_a_gate_run() -> None:
    router, seen = Router(8, 4, 2), list[str]()
    router(torch.randn(3, 8))
    router.gate.register_forward_hook(lambda *_: seen.append("forward"))
    router.gate.register_full_backward_hook(lambda *_: seen.append("backward"))
    router(torch.randn(3, 8, requires_grad=True)).top_k_weights.square().sum().backward()

    assert seen == ["forward", "backward"]


def test_a_gate_under_autocast_stays_in_float32() -> None:
    router, x = Router(64, 16, 2), torch.randn(9, 64)
    expected = router(x).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = router(x).logits

    assert torch.equal(logits, expected)
