"""Identity experts, latent experts and shared experts, as ops in a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
)

T, H, F, E, MORE, K = 14, 6, 5, 4, 3, 3
D = torch.float64


def experts(width: int) -> list[Any]:
    how: dict[str, Any] = {"bias": False, "dtype": D}
    up, down = GroupedLinear(E, width, 2 * F, **how), GroupedLinear(E, F, width, **how)
    return [Dispatch(E), up, SwiGLU(), down, Scale(), Combine()]


def one_by_one(layer: Sequential, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The weighted outputs of real experts, token by token; and of identity experts the tokens."""
    up, down = (op.weight for op in layer if isinstance(op, GroupedLinear))
    rows = []
    for token, ids, of_slots in zip(x, index.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for expert, weight in zip(ids, of_slots, strict=True):
            gate, value = (up[expert] @ token).chunk(2) if 0 <= expert < E else (None, None)
            y = token if gate is None else down[expert] @ (torch.nn.functional.silu(gate) * value)
            row = row + weight * y * (expert >= 0)
        rows.append(row)
    return torch.stack(rows)


@pytest.fixture
def routes() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, router = torch.randn(T, H, dtype=D), Router(H, E + MORE, K, dtype=D, scale=2.0)
    found = router(x)
    index = found.top_k_index.clone()
    index[3] = -1  # a pad
    return x.requires_grad_(), index, found.top_k_weights.detach().requires_grad_()


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_identity_experts_add_the_token(routes: tuple[Tensor, Tensor, Tensor], index_dtype: torch.dtype) -> None:
    x, index, weights = routes
    layer = Sequential(IdentityExperts(E), *experts(H), AddExtraInput("identity"))
    y = layer(x, top_k_index=index.to(index_dtype), top_k_weights=weights)
    expected = one_by_one(layer, x, index, weights)

    assert (index >= E).any()
    torch.testing.assert_close(y, expected)
    leaves = [x, weights, *layer.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(t.square().sum(), leaves) for t in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "RoutedMLP" in str(layer.explain())


def test_identity_experts_by_finite_differences(routes: tuple[Tensor, Tensor, Tensor]) -> None:
    x, index, weights = routes
    op = IdentityExperts(E)

    assert torch.autograd.gradcheck(lambda x, w: op(x, top_k_index=index, top_k_weights=w), (x, weights))


@pytest.mark.parametrize("norm", [True, False])
def test_latent_experts_are_a_sequence(routes: tuple[Tensor, Tensor, Tensor], norm: bool) -> None:
    """Nemotron-3 has no norm, Kimi-K3 one: the router sees the whole token, the experts its projection."""
    x, index, weights = routes
    width = 4
    down, up = Linear(H, width, bias=False, dtype=D), Linear(width, H, bias=False, dtype=D)
    between = [nn.RMSNorm(width, dtype=D)] if norm else []
    layer = Sequential(down, *experts(width), *between, up)
    index = index.masked_fill(index >= E, -1)
    y = layer(x, top_k_index=index, top_k_weights=weights)
    expected = one_by_one(layer, x @ down.weight.T, index, weights)
    for module in between:
        expected = module(expected)

    torch.testing.assert_close(y, expected @ up.weight.T)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_a_branch_of_the_sequence(gated: bool) -> None:
    """The bits and gradients of ``MoE`` with ``shared_ffn``, and with ``shared_gate``."""
    torch.manual_seed(0)
    moe, x = MoE(H, F, E, 2, shared_ffn=F, shared_gate=gated, dtype=D), torch.randn(T, H, dtype=D, requires_grad=True)
    branch = [MakeExtraOutput("tokens"), moe.shared, SwapExtra("tokens", "shared")]
    layer = Sequential(*branch, *moe.experts, AddExtraInput("shared"))
    routes, expected = moe.router(x), moe(x).y
    y = layer(x, top_k_index=routes.top_k_index, top_k_weights=routes.top_k_weights)

    torch.testing.assert_close(y, expected)
    leaves = [x, *moe.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(t.square().sum(), leaves) for t in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "RoutedMLP" in str(layer.explain())


def test_identity_experts_say_what_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match="num_experts must be at least 1"):
        IdentityExperts(0)
    with pytest.raises(ArgumentError, match=r"top_k_index must be \[T, k\], T=2 as x has tokens, got shape \[3, 1\]"):
        IdentityExperts(2)(torch.zeros(2, 4), top_k_index=torch.zeros(3, 1).long(), top_k_weights=torch.zeros(3, 1))
