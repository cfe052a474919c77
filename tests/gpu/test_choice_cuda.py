"""The choice of experts on a GPU, and routers that run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checks import choice, gate
from checks.choice import Case
from checks.device import needs_hopper

from fusible import MoE, Router, SignBias, SwitchLoss, ZLoss, config
from fusible.ops.kernels.problems.choice import SCORES

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
]


@pytest.fixture(autouse=True)
def _no_other_kernels() -> Iterator[None]:
    """PyTorch's operations would be right as well."""
    with config(backend="hopper"):
        yield


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("tokens", [1, 64, 2051])
@pytest.mark.parametrize("experts", [7, 8, 60, 128, 511, 512, 513, 896, 1024, 1025, 2048, 4096])
def test_choices_and_gradients(scores: str, tokens: int, experts: int) -> None:
    for top_k in (1, 2, 8, 16, 22, 32):
        if top_k <= experts:
            for biased in (True, False):
                case = Case(experts, top_k, tokens, scores, normalize=top_k % 4 > 0, biased=biased, pads=biased)
                choice.check("cuda", case)


@pytest.mark.parametrize("groups", [(8, 4, 2), (8, 3, 1), (32, 2, 2)])
def test_groups(groups: tuple[int, int, int]) -> None:
    for experts in (64, 256, 1024, 4096):
        choice.check("cuda", Case(experts, 4, 300, "sigmoid", groups=groups, biased=True))


@pytest.mark.parametrize("scores", SCORES)
def test_given_experts(scores: str) -> None:
    for normalize in (True, False):
        choice.check("cuda", Case(60, 5, 333, scores, normalize, given=True, pads=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [61, 96])
def test_logits_of_16_bits(dtype: torch.dtype, experts: int) -> None:
    for scores in SCORES:
        choice.check("cuda", Case(experts, 6, 100, scores=scores, dtype=dtype, pads=True))


@pytest.mark.parametrize("tokens", [0, 1, 8191])
def test_tokens(tokens: int) -> None:
    choice.check("cuda", Case(128, 8, tokens))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("by_scores", [True, False])
def test_odd_numbers(scores: str, by_scores: bool) -> None:
    choice.check_odd("cuda", scores, 60, by_scores)


@pytest.mark.parametrize("biased", [True, False])
def test_large_logits(biased: bool) -> None:
    choice.check_large("cuda", biased)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_numbers_beside_odd_ones(scores: str, normalize: bool) -> None:
    choice.check_beside_odd("cuda", scores, normalize)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("experts", [60, 1100])
def test_near_ties(scores: str, experts: int) -> None:
    choice.check_near_ties("cuda", scores, experts)


@pytest.mark.parametrize("sizes", [(256, 8), (896, 16), (1100, 4)])
def test_tokens_do_not_see_one_another(sizes: tuple[int, int]) -> None:
    choice.check_alone("cuda", Case(*sizes, tokens=4000, scores="sigmoid", biased=True))


def test_a_graph_chooses_for_other_logits() -> None:
    case = Case(128, 8, 512, "sigmoid", biased=True)
    p = choice.problem("cuda", case)
    choice.chosen(p)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = choice.chosen(p)
    p.logits.copy_(choice.numbers("cuda", 512, 128, seed=9))
    graph.replay()

    for mine, theirs in zip(out, choice.chosen(p), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("sizes", [*gate.SIZES, (2051, 2048, 128), (64, 7168, 256)], ids=str)
def test_the_gate_is_near_float64(sizes: tuple[int, int, int]) -> None:
    gate.check("cuda", sizes)


def test_the_logits_of_a_token_depend_on_no_other() -> None:
    gate.check_alone("cuda")


H, E, K, T = 64, 128, 8, 200


def router(**how: Any) -> Router:
    torch.manual_seed(0)
    losses, balance = (SwitchLoss(0.5), ZLoss(0.125)), SignBias(1e-3)
    return Router(H, E, K, scores="sigmoid", losses=losses, balance=balance, device="cuda", **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_gives_what_pytorch_gives(dtype: torch.dtype) -> None:
    part, x, found = router(dtype=dtype), torch.randn(T, H, device="cuda", dtype=dtype), []
    for backend in ("hopper", "loop"):
        with config(backend=backend):
            part.zero_grad()
            routes = part(x, valid=torch.arange(T, device="cuda") % 5 > 0)
            (routes.top_k_weights.square().sum() + routes.loss).backward()
            found.append([*routes[:3], routes.loss.detach(), part.weight.grad])

    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert "fusible (choose)" in str(part.choice.explain())


@pytest.mark.parametrize("how", [{"scores": "sigmoid", "bias_update_rate": 0.1}, {"losses": (ZLoss(0.1),)}], ids=str)
@pytest.mark.parametrize("shared", [None, 32])
def test_calls_of_a_layer_give_the_same_bits(how: dict[str, Any], shared: int | None) -> None:
    """A call that differs is named with its tensors. A shared expert shows whether the order of a sum does it."""
    choice.check_calls_of_a_layer("cuda", how, shared)


def test_routers_wait_for_nothing() -> None:
    part, x = router(), torch.randn(T, H, device="cuda")
    part(x).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            routes = part(x)
            (routes.top_k_weights.sum() + routes.loss).backward()
            part.update_bias()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_layer_is_the_eager_one() -> None:
    torch.manual_seed(0)
    layer = MoE(H, 64, E, K, balance_loss=0.5, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    eager, compiled = layer(x), torch.compile(layer, fullgraph=True)(x)

    assert torch.equal(eager.tokens_per_expert, compiled.tokens_per_expert)
    torch.testing.assert_close(eager.balance_loss, compiled.balance_loss)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_routes_are_those_of_eager_code() -> None:
    choice.check_one_graph("cuda", "inductor")
