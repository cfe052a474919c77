"""A routed layer as one sequence: its router, identity experts, latent experts and shared experts, each as ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks.moe import UNFUSED
from torch import Tensor, nn
from torch.nn import functional as F

from fusible import (
    AddExtraInput,
    ArgumentError,
    Combine,
    Dispatch,
    GroupedLinear,
    IdentityExperts,
    Linear,
    MakeExtraOutput,
    MoE,
    Router,
    Scale,
    Sequential,
    SwapExtra,
    SwiGLU,
    config,
)

T, H, WIDTH, E, MORE, K, LATENT = 14, 6, 5, 4, 3, 3, 4
D = torch.float64
LAYERS = ["plain", "identity", "latent", "latent norm", "shared", "shared gate", "identity latent norm shared gate"]
VALID = torch.arange(T) % 5 != 3


def linear(columns: int, rows: int) -> Linear:
    return Linear(columns, rows, bias=False, dtype=D)


def silu_gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


class Shared(nn.Module):
    """Shared experts, with the gate of Qwen2-MoE or without."""

    def __init__(self, has_gate: bool) -> None:
        super().__init__()
        self.up, self.down = linear(H, 2 * WIDTH), linear(WIDTH, H)
        self.mlp = Sequential(self.up, SwiGLU(), self.down)
        self.gate = linear(H, 1) if has_gate else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y if self.gate is None else y * self.gate(x).sigmoid()

    def plain(self, token: Tensor) -> Tensor:
        y = self.down.weight @ silu_gated(self.up.weight @ token)
        return y if self.gate is None else y * (self.gate.weight @ token).sigmoid()


class Layer(nn.Module):
    """A layer of named parts as one sequence, and token by token in plain PyTorch."""

    def __init__(self, parts: str, routes_inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routes_inside, experts = routes_inside, E + MORE * ("identity" in parts)
        self.router = Router(H, experts, K, scores="sigmoid", scale=2.0, bias=True, selection_bias=True, dtype=D)
        nn.init.normal_(self.router.bias, std=0.3)
        nn.init.normal_(self.router.selection_bias, std=0.3)
        width = LATENT if "latent" in parts else H
        self.up = GroupedLinear(E, width, 2 * WIDTH, bias=False, dtype=D)
        self.down = GroupedLinear(E, WIDTH, width, bias=False, dtype=D)
        self.enter, self.leave = (linear(H, LATENT), linear(LATENT, H)) if "latent" in parts else (None, None)
        self.norm = nn.RMSNorm(LATENT, dtype=D) if "norm" in parts else None
        self.shared = Shared("gate" in parts) if "shared" in parts else None
        self.sequence = Sequential(*self._ops("identity" in parts))

    def _ops(self, has_identity: bool) -> list[nn.Module]:
        router, ops = self.router, list[nn.Module | None]()
        if self.routes_inside:
            ops += [MakeExtraOutput("x_of_router"), router.gate, router.choice]
            ops += [SwapExtra("x_of_router", "top_k_weights")]
        ops += [IdentityExperts(E)] if has_identity else []
        if self.shared is not None:
            ops += [MakeExtraOutput("tokens"), self.shared, SwapExtra("tokens", "shared")]
        ops += [self.enter, Dispatch(E), self.up, SwiGLU(), self.down, Scale(), Combine(), self.norm, self.leave]
        ops += [AddExtraInput("identity")] if has_identity else []
        ops += [AddExtraInput("shared")] if self.shared is not None else []
        return [op for op in ops if op is not None]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the slots of each expert."""
        router = self.router
        if self.routes_inside:
            weights = {"weight": router.weight, "logit_bias": router.bias, "selection_bias": router.selection_bias}
            y, counts = self.sequence(x, **weights, valid=VALID)
            return y, counts
        routes = router(x, valid=VALID)
        y = self.sequence(x, top_k_index=routes.top_k_index, top_k_weights=routes.top_k_weights)
        return y, routes.tokens_per_expert

    def output(self, x: Tensor) -> Tensor:
        return self(x)[0]  # type: ignore[no-any-return]

    def plain(self, x: Tensor) -> Tensor:
        return torch.stack([self._of_token(*pair) for pair in zip(x, VALID.tolist(), strict=True)])

    def _of_token(self, token: Tensor, is_valid: bool) -> Tensor:
        entered = token if self.enter is None else self.enter.weight @ token
        routed, identity = torch.zeros_like(entered), torch.zeros_like(token)
        for expert, weight in self._choices(token) if is_valid else []:
            if expert < E:
                routed = routed + weight * (self.down.weight[expert] @ silu_gated(self.up.weight[expert] @ entered))
            else:
                identity = identity + weight * token
        routed = routed if self.norm is None else self.norm(routed)
        y = identity + (routed if self.leave is None else self.leave.weight @ routed)
        return y if self.shared is None else y + self.shared.plain(token)

    def _choices(self, token: Tensor) -> list[tuple[int, Tensor]]:
        """The experts of a token with their weights."""
        scores = (self.router.weight @ token + self.router.bias).sigmoid()
        keys = (scores + self.router.selection_bias).tolist()
        ids = sorted(range(len(keys)), key=lambda e: -keys[e])[:K]
        return [(e, 2.0 * scores[e] / sum(scores[i] for i in ids)) for e in ids]


def results(layer: Layer, run: Any, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and all parameters."""
    y = run(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def tokens() -> Tensor:
    return torch.randn(T, H, dtype=D, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("parts", LAYERS)
@pytest.mark.parametrize("routes_inside", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_layer_of_ops_is_the_loop_over_tokens(parts: str, routes_inside: bool, fused: bool) -> None:
    layer, x = Layer(parts, routes_inside), tokens()
    with config(disable_fusions=set() if fused else UNFUSED):
        ours = results(layer, layer.output, x)
        steps = [step.name for step in layer.sequence.explain().steps]

    assert ("RoutedMLP" in steps) == fused
    names = ["y", "x", *dict(layer.named_parameters())]
    for name, *pair in zip(names, ours, results(layer, layer.plain, x), strict=True):
        torch.testing.assert_close(*pair, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("parts", LAYERS)
def test_a_router_inside_gives_the_bits_of_one_before(parts: str) -> None:
    before, inside, x = Layer(parts, False), Layer(parts, True), tokens()

    assert torch.equal(before(x)[1], inside(x)[1])
    for ours, theirs in zip(*(results(each, each.output, x) for each in (before, inside)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("routes_inside", [False, True])
def test_a_layer_of_ops_compiles_as_one_graph(routes_inside: bool) -> None:
    layer, x = Layer(LAYERS[-1], routes_inside), tokens()
    compiled = torch.compile(layer.output, backend="aot_eager", fullgraph=True)

    for ours, theirs in zip(*(results(layer, run, x) for run in (compiled, layer.output)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_those_of_the_layer(gated: bool) -> None:
    """The gradients of ``MoE`` with ``shared_ffn``, and with ``shared_gate``."""
    torch.manual_seed(0)
    moe, x = MoE(H, WIDTH, E, 2, shared_ffn=WIDTH, shared_gate=gated, dtype=D), tokens()
    branch = [MakeExtraOutput("tokens"), moe.shared, SwapExtra("tokens", "shared")]
    layer = Sequential(*branch, *moe.experts, AddExtraInput("shared"))
    routes, expected = moe.router(x), moe(x).y
    y = layer(x, top_k_index=routes.top_k_index, top_k_weights=routes.top_k_weights)

    torch.testing.assert_close(y, expected)
    leaves = [x, *moe.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(t.square().sum(), leaves) for t in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_identity_experts_by_finite_differences(dtype: torch.dtype) -> None:
    index = (torch.arange(T * K).view(T, K) % (E + MORE)).to(dtype)
    index[3] = -1  # a pad
    weights = torch.rand(T, K, dtype=D, generator=torch.Generator().manual_seed(2)).requires_grad_()
    op = IdentityExperts(E)

    assert torch.autograd.gradcheck(lambda x, w: op(x, top_k_index=index, top_k_weights=w), (tokens(), weights))


def test_identity_experts_say_what_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match="num_experts must be at least 1"):
        IdentityExperts(0)
    with pytest.raises(ArgumentError, match=r"top_k_index must be \[T, k\], T=2 as x has tokens, got shape \[3, 1\]"):
        IdentityExperts(2)(torch.zeros(2, 4), top_k_index=torch.zeros(3, 1).long(), top_k_weights=torch.zeros(3, 1))
