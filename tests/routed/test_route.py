"""``functional.route``, and ``valid`` and ``ids`` of ``Router`` and ``MoE``: formulas, odd numbers, tokens left out."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from checks.choice import check_one_graph
from torch import Tensor

from fusible import ArgumentError, Groups, MoE, Router, Routes
from fusible.functional import route

T, E, K, H = 9, 8, 3, 6
D = torch.float64
INF = math.inf
CHOICES: dict[str, dict[str, Any]] = {
    "": {},
    "bias": {"bias": torch.linspace(0.3, -0.3, E, dtype=D)},
    "groups": {"groups": Groups(4, keep=2)},
    "groups by their best": {"groups": Groups(4, keep=2, best=1)},
    "bias and groups": {"bias": torch.linspace(0.3, -0.3, E, dtype=D), "groups": Groups(2, keep=1)},
}


def logits_of(tokens: int = T, seed: int = 0) -> Tensor:
    return 2 * torch.randn(tokens, E, dtype=D, generator=torch.Generator().manual_seed(seed))


def score(row: list[float], e: int, scores: str) -> float:
    if scores == "softmax":
        return math.exp(row[e]) / sum(map(math.exp, row))
    return 1 / (1 + math.exp(-row[e])) if scores == "sigmoid" else math.sqrt(math.log1p(math.exp(row[e])))


def by_hand(logits: Tensor, scores: str, normalize: bool, scale: float, how: dict[str, Any]) -> tuple[Any, Any]:
    """Expert by expert, in Python's numbers."""
    ids, weights = [], []
    groups, bias = how.get("groups", Groups(1, 1)), how.get("bias", torch.zeros(E)).tolist()
    for row in logits.tolist():
        of = [score(row, e, scores) for e in range(E)]
        keys, each = [s + b for s, b in zip(of, bias, strict=True)], E // groups.count
        sums = [sum(sorted(keys[g * each : (g + 1) * each])[-groups.best :]) for g in range(groups.count)]
        kept = sorted(range(groups.count), key=lambda g: (-sums[g], g))[: groups.keep]
        chosen = sorted((e for e in range(E) if e // each in kept), key=lambda e: (-keys[e], e))[:K]
        total = sum(of[e] for e in chosen) if normalize else 1
        ids.append(chosen)
        weights.append([scale * of[e] / total for e in chosen])
    return ids, torch.tensor(weights, dtype=D)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
def test_routes_are_those_of_the_formulas(scores: str, normalize: bool, choice: str) -> None:
    logits, how = logits_of(), CHOICES[choice]
    routes = route(logits, K, scores=scores, normalize=normalize, scale=2.5, **how)
    ids, weights = by_hand(logits, scores, normalize, 2.5, how)
    of = torch.tensor([[score(row, e, scores) for e in range(E)] for row in logits.tolist()], dtype=D)

    assert routes.top_k_index.tolist() == ids
    torch.testing.assert_close(routes.top_k_weights, weights)
    torch.testing.assert_close(routes.probabilities, of / of.sum(-1, keepdim=True))
    assert routes.tokens_per_expert.tolist() == [sum(row.count(e) for row in ids) for e in range(E)]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_those_of_finite_differences(scores: str, normalize: bool) -> None:
    valid, ids = torch.arange(T) % 4 != 1, route(logits_of(seed=1), K).top_k_index

    def results(logits: Tensor) -> tuple[Tensor, Tensor]:
        routes = route(logits, K, scores=scores, normalize=normalize, valid=valid, ids=ids)
        return routes.top_k_weights, routes.probabilities[valid]

    assert torch.autograd.gradcheck(results, logits_of().requires_grad_())


@pytest.mark.parametrize("scores", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("low", [-46.0, -60, -90, -200, -1e4])
def test_weights_add_up_where_all_scores_underflow(scores: str, low: float) -> None:
    logits = torch.linspace(low - 1, low, E).repeat(T, 1).requires_grad_()
    routes = route(logits, K, scores=scores, scale=2.0)
    (grad,) = torch.autograd.grad(routes.top_k_weights[:, 0].sum(), logits)

    torch.testing.assert_close(routes.top_k_weights.sum(-1), torch.full((T,), 2.0))
    torch.testing.assert_close(routes.probabilities.sum(-1), torch.ones(T))
    assert grad[:, -1].min() > 0.1
    assert routes.top_k_index.tolist() == [[7, 6, 5]] * T


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pad", [0.0, math.nan, INF, -INF])
def test_rows_that_are_not_valid_go_nowhere(normalize: bool, pad: float) -> None:
    valid = torch.arange(T) % 3 != 0
    logits = logits_of().masked_fill(~valid.unsqueeze(-1), pad).requires_grad_()
    routes, alone = route(logits, K, normalize=normalize, valid=valid), route(logits[valid], K, normalize=normalize)
    (grad,) = torch.autograd.grad(routes.top_k_weights[:, 0].sum() + routes.probabilities.sum(), logits)

    assert (routes.top_k_index[~valid] == -1).all()
    assert not routes.top_k_weights[~valid].any()
    assert not grad[~valid].any()
    assert torch.equal(routes.top_k_index[valid], alone.top_k_index)
    assert torch.equal(routes.top_k_weights[valid], alone.top_k_weights)
    assert torch.equal(routes.tokens_per_expert, alone.tokens_per_expert)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_given_ids_have_the_weights_of_these_logits(dtype: torch.dtype) -> None:
    logits, ids = logits_of(), route(logits_of(seed=3), K).top_k_index.to(dtype)
    ids[0], ids[1, 1], ids[2, 2], ids[3] = -1, -1, E, 4
    routes = route(logits, K, scores="sigmoid", ids=ids)
    chosen = logits.sigmoid().gather(-1, ids.long().clamp(0, E - 1)).masked_fill((ids < 0) | (ids >= E), 0)

    assert torch.equal(routes.top_k_index[0], route(logits, K).top_k_index[0])
    assert torch.equal(routes.top_k_index[1:], ids[1:].long())
    torch.testing.assert_close(routes.top_k_weights[1:], (chosen / chosen.sum(-1, keepdim=True))[1:])
    assert int(routes.tokens_per_expert.sum()) == T * K - 2


def test_own_ids_given_again_change_no_bit() -> None:
    how: dict[str, Any] = {"scores": "sigmoid", "scale": 2.5, "bias": CHOICES["bias"]["bias"]}
    routes = route(logits_of(), K, **how)
    again = route(logits_of(), K, **how, ids=routes.top_k_index)

    assert all(torch.equal(*pair) for pair in zip(routes[:4], again[:4], strict=True))


@pytest.mark.parametrize("normalize", [True, False])
def test_odd_rows_stay_odd_alone(normalize: bool) -> None:
    logits = logits_of()
    logits[0], logits[1, 2], logits[2, 1:] = -INF, math.nan, -INF
    leaf = logits.clone().requires_grad_()
    routes = route(leaf, K, normalize=normalize)
    (grad,) = torch.autograd.grad(routes.top_k_weights.square().sum(), leaf)

    assert routes.top_k_index[0].tolist() == [0, 1, 2]
    assert routes.top_k_weights[0].tolist() == [0, 0, 0]
    assert routes.top_k_index[1, 0] == 2
    assert routes.top_k_weights[1].isnan().any()
    assert routes.top_k_weights[2].tolist() == [1, 0, 0]
    assert grad[3:].isfinite().all()
    assert torch.equal(routes.top_k_weights[3:], route(logits[3:], K, normalize=normalize).top_k_weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_computed_in_float32(dtype: torch.dtype) -> None:
    routes, wide = route(logits_of().to(dtype), K), route(logits_of().to(dtype).float(), K)

    assert routes.top_k_weights.dtype == torch.float32
    assert torch.equal(routes.top_k_weights, wide.top_k_weights)


def test_no_tokens() -> None:
    routes = route(logits_of(0), K, valid=torch.zeros(0, dtype=torch.bool))

    assert routes.top_k_index.shape == routes.top_k_weights.shape == (0, K)
    assert routes.tokens_per_expert.tolist() == [0] * E


def moe(**how: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(H, 5, E, K, balance_loss=0.5, bias_update_rate=1e-3, dtype=D, **how)


@pytest.mark.parametrize("how", [{}, {"shared_ffn": 4}, {"scores": "sigmoid", "groups": 4, "top_groups": 2}])
def test_a_batch_with_pads_is_the_batch_without(how: dict[str, Any]) -> None:
    padded, alone, valid = moe(**how), moe(**how), torch.arange(40).view(4, 10) % 10 == 3
    x = torch.randn(4, 10, H, dtype=D)
    x[~valid] = x[~valid].sign()
    ours, theirs = padded(x, valid=valid), alone(x[valid])
    for layer, output, y in ((padded, ours, ours.y[valid]), (alone, theirs, theirs.y)):
        (y.square().sum() + output.balance_loss).backward()
        layer.update_bias()

    torch.testing.assert_close(ours.y[valid], theirs.y)
    torch.testing.assert_close(ours.balance_loss, theirs.balance_loss)
    assert torch.equal(ours.tokens_per_expert, theirs.tokens_per_expert)
    assert torch.equal(padded.router.selection_bias, alone.router.selection_bias)
    for (name, p), q in zip(padded.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
    expected = padded.shared(x[~valid]) if "shared_ffn" in how else torch.zeros(36, H, dtype=D)
    torch.testing.assert_close(ours.y[~valid], expected)


def test_a_layer_replays_ids_of_another_run() -> None:
    layer, x = moe(), torch.randn(2, 5, H, dtype=D)
    ids = route(logits_of(10), K).top_k_index.view(2, 5, K).to(torch.int16)
    output = layer(x, ids=ids)
    routes = layer.router(x.view(-1, H), ids=ids.view(-1, K))
    expected = layer.experts(x.view(-1, H), top_k_index=ids.view(-1, K).long(), top_k_weights=routes.top_k_weights)

    assert torch.equal(output.y, expected.view(2, 5, H))
    assert output.tokens_per_expert.tolist() == ids.flatten().long().bincount(minlength=E).tolist()


def test_a_single_choice_trains_the_router() -> None:
    layer, x = MoE(H, 5, E, 1, dtype=D), torch.randn(20, H, dtype=D)
    layer(x).y.square().sum().backward()

    assert layer.router.weight.grad.abs().max() > 1e-3


def test_a_weight_that_is_always_one_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the weight is 1 whatever the scores"):
        Router(H, E, 1, normalize=True)


def test_a_router_takes_groups_in_both_forms() -> None:
    with torch.no_grad():
        old, new = Router(H, E, K, groups=4, top_groups=2), Router(H, E, K, groups=Groups(4, keep=2))
        new.load_state_dict(old.state_dict())
        x = torch.randn(T, H)

        assert torch.equal(old(x).top_k_index, new(x).top_k_index)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_routes_are_those_of_eager_code() -> None:
    check_one_graph("cpu", "aot_eager")


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_with_pads_and_ids() -> None:
    layer, other, x = moe(), moe(), torch.randn(T, H, dtype=D)
    given = {"valid": torch.arange(T) % 3 != 0, "ids": route(logits_of(), K).top_k_index}
    eager, compiled = layer(x, **given), torch.compile(other, backend="aot_eager", fullgraph=True)(x, **given)

    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs)


GOOD = torch.zeros(T, E)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"logits": torch.zeros(E)}, "route: logits must be floating-point [T, E], got float32 [8]"),
        ({"logits": GOOD.long()}, "route: logits must be floating-point [T, E], got int64 [9, 8]"),
        (
            {"valid": torch.ones(T, dtype=torch.int64)},
            "route: valid must be bool [T], True for a real token, T=9; got int64 [9]; a padding mask is valid=~mask",
        ),
        ({"valid": torch.ones(2, dtype=torch.bool)}, "got bool [2]"),
        (
            {"ids": torch.zeros(T, 2, dtype=torch.int64)},
            "route: ids must be whole numbers [T, top_k], T=9, top_k=3, -1 for a missing row; got int64 [9, 2]",
        ),
        ({"ids": torch.zeros(T, K)}, "got float32 [9, 3]"),
        ({"scores": "relu"}, "route: scores must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'"),
        ({"logits": [[0.0] * E] * T}, "route: logits must be floating-point [T, E], got a list"),
        ({"valid": [True] * T}, "got a list; a padding mask is valid=~mask"),
        ({"ids": [[0] * K] * T}, "-1 for a missing row; got a list"),
        ({"bias": [0.0] * E}, "route: bias must be floating-point [E], E=8, got a list"),
        ({"top_k": 0}, "route: top_k must be at least 1, got 0"),
        ({"top_k": True}, "route: top_k must be an int, got True"),
        ({"scale": "2"}, "route: scale must be a finite number, got '2'"),
        ({"normalize": "no"}, "route: normalize must be True or False, got 'no'"),
        ({"logits": GOOD.to_sparse()}, "route: logits: expected a dense tensor, got a torch.sparse_coo one"),
        ({"groups": 4}, "route: groups must be a fusible.Groups, such as Groups(8, keep=4), got 4"),
        ({"top_k": 9}, "route: top_k must be at most num_experts=8, got 9"),
        ({"groups": Groups(3, 1)}, "route: groups must divide num_experts=8, got groups=3"),
        ({"groups": Groups(4, 1)}, "route: 1 of 4 groups hold 2 experts, which are fewer than top_k=3"),
    ],
)
def test_calls_that_cannot_be(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        route(**{"logits": GOOD, "top_k": K, **how})


def test_a_refused_choice_leaves_the_next_one_right() -> None:
    """7.0 and 7 are equal keys of a cache."""
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"route: top_k must be an int, got 7\.0"):
            route(GOOD, 7.0)  # type: ignore[arg-type]

    assert route(GOOD, 7).top_k_index.shape == (T, 7)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"valid": torch.ones(T, 2, dtype=torch.bool)}, "MoE: valid must be [...], as the tokens [..., 6]: [9]"),
        ({"ids": torch.zeros(2, T, K, dtype=torch.int64)}, "MoE: ids must be [..., 3], as the tokens [..., 6]: [9, 3]"),
    ],
)
def test_layers_say_what_does_not_fit(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        moe()(torch.zeros(T, H, dtype=D), **how)


def test_groups_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="Groups: keep must be at most count=2, got 3"):
        Groups(2, keep=3)
    with pytest.raises(ValueError, match="count must be at least 1"):
        Groups(0, keep=0)


def test_routes_have_their_logits() -> None:
    logits = logits_of()
    routes = route(logits, K, scores="sigmoid")

    assert isinstance(routes, Routes)
    assert torch.equal(routes.logits, logits)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bias": torch.zeros(3)}, "route: bias must be floating-point [E], E=4, got float32 [3]"),
        ({"bias": torch.zeros(1)}, "route: bias must be floating-point [E], E=4, got float32 [1]"),
        ({"bias": torch.zeros(4).int()}, "route: bias must be floating-point [E], E=4, got int32 [4]"),
        ({"bias": torch.zeros(4, device="meta")}, "route: bias must be on cpu, as the logits, got meta"),
        ({"valid": torch.ones(2, device="meta").bool()}, "route: valid must be on cpu, as the logits, got meta"),
        ({"valid": torch.ones(2).bool().to_sparse()}, "route: valid: expected a dense tensor, got a torch.sparse_coo"),
        ({"ids": torch.ones(2, 2).long().to_sparse()}, "route: ids: expected a dense tensor, got a torch.sparse_coo"),
    ],
)
def test_tensors_that_kernels_would_read_past_their_end(given: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        route(torch.randn(2, 4), 2, **given)  # type: ignore[arg-type]
