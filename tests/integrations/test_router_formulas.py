"""The formulas of routers against those of the installed Megatron-Core, torchtitan and transformers, in float64."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from absent import triton_if_missing
from torch import Tensor, nn

from fusible import Groups, Router, SequenceLoss, SignBias, SwitchLoss, ZLoss
from fusible.functional import route

T, E, K, H, D = 24, 16, 4, 8, torch.float64
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax over all": {"normalize": False},
    "sigmoid": {"scores": "sigmoid"},
    "sigmoid, bias": {"scores": "sigmoid", "bias": torch.linspace(0.2, -0.2, E, dtype=D)},
    "sigmoid, groups": {"scores": "sigmoid", "groups": Groups(4, keep=2, best=2)},
    "sigmoid, groups, bias": {
        **{"scores": "sigmoid", "groups": Groups(4, keep=2, best=2)},
        "bias": torch.linspace(0.2, -0.2, E, dtype=D),
    },
}


def optional(name: str) -> ModuleType:
    with triton_if_missing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


@pytest.fixture
def megatron() -> ModuleType:
    return optional("megatron.core.transformer.moe.moe_utils")


def logits_of(seed: int = 0) -> Tensor:
    return 2 * torch.randn(T, E, dtype=D, generator=torch.Generator().manual_seed(seed))


def dense(ids: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(len(ids), E, dtype=weights.dtype).scatter(1, ids, weights)


@pytest.mark.parametrize("name", RULES)
def test_routes_and_gradients_are_those_of_megatron(megatron: ModuleType, name: str) -> None:
    rule, found = RULES[name], []
    groups = rule.get("groups")
    how: dict[str, Any] = {
        "use_pre_softmax": name == "softmax over all",
        "score_function": rule.get("scores", "softmax"),
    }
    how |= {} if groups is None else {"num_groups": groups.count, "group_topk": groups.keep}
    for own in (True, False):
        logits = logits_of().requires_grad_()
        if own:
            routes = route(logits, K, scale=2.5, **rule)
            weights = dense(routes.top_k_index, routes.top_k_weights)
        else:
            bias = rule.get("bias")
            weights, chosen = megatron.topk_routing_with_score_function(
                logits, K, scaling_factor=2.5, expert_bias=bias, **how
            )
            assert torch.equal(weights > 0, chosen)
        (weights * torch.linspace(-1, 1, E, dtype=D)).sum().backward()
        found.append((weights.detach(), logits.grad))

    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)  # Megatron's softmax is in float32


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses_are_those_of_megatron(megatron: ModuleType, scores: str) -> None:
    """Where the choice is that by scores alone, from which Megatron takes the shares."""
    switch, of_sequences, z = SwitchLoss(0.5), SequenceLoss(0.3), ZLoss(0.1)
    router, x = Router(H, E, K, scores=scores, losses=(switch, of_sequences, z), dtype=D), torch.randn(T, H, dtype=D)
    routes = router(x, sequences=8)
    chosen, chances = megatron.compute_routing_scores_for_aux_loss(routes.logits, K, scores)

    def of(rows: slice) -> Tensor:
        shares, count = chosen[rows].sum(0), len(chances[rows])
        return megatron.switch_load_balancing_loss_func(chances[rows], shares, count, K, E, 1.0)

    expected = 0.5 * of(slice(None)) + 0.3 * torch.stack([of(slice(i, i + 8)) for i in range(0, T, 8)]).mean()
    expected = expected + megatron.z_loss_func(routes.logits, 0.1)
    torch.testing.assert_close(routes.loss, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, router.weight, retain_graph=True) for loss in (routes.loss, expected)),
        **{"rtol": 1e-5, "atol": 1e-7},
    )


def test_a_step_of_the_bias_is_that_of_megatron(megatron: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(megatron, "parallel_state", type("Groups", (), {"__getattr__": lambda *_: lambda **_: None})())
    bias, load = torch.linspace(-1, 1, E), torch.randint(0, 9, (E,), generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(
        SignBias(0.25).next_bias(bias, load, K), megatron.get_updated_expert_bias(load, bias, 0.25)
    )


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_routes_are_those_of_torchtitan(scores: str, normalize: bool, grouped: bool, biased: bool) -> None:
    titan = optional("torchtitan.models.common.moe").TokenChoiceTopKRouter
    theirs = titan.__new__(titan)
    nn.Module.__init__(theirs)
    theirs.gate = nn.Identity()
    sizes = {"num_experts": E, "top_k": K, "num_expert_groups": 4 if grouped else None, "num_limited_groups": 2}
    rule = {"score_func": scores, "route_norm": normalize, "route_scale": 2.5, "_debug_force_load_balance": False}
    for name, value in {**sizes, **rule}.items():
        setattr(theirs, name, value)
    bias, groups = torch.linspace(0.2, -0.2, E, dtype=D) if biased else None, Groups(4, keep=2) if grouped else None
    logits = logits_of()
    weights, ids, _ = theirs(logits.unsqueeze(0), bias)
    routes = route(logits, K, scores=scores, normalize=normalize, scale=2.5, bias=bias, groups=groups)

    torch.testing.assert_close(dense(routes.top_k_index, routes.top_k_weights), dense(ids[0], weights[0]))


def test_the_loss_of_transformers_is_k_times_as_large() -> None:
    """As docs/router.md says of ``router_aux_loss_coef``; of one layer, with and without padding."""
    theirs = optional("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    router, x = Router(H, E, K, losses=(SwitchLoss(float(K)),), dtype=D), torch.randn(T, H, dtype=D)
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    for valid in (None, mask):
        routes = router(x, valid=None if valid is None else valid.view(-1).bool())
        torch.testing.assert_close(routes.loss, theirs((routes.logits,), E, K, valid).double(), rtol=1e-6, atol=1e-7)
