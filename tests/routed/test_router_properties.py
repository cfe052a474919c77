"""Properties of routers, for parts and tokens that hypothesis draws; in PyTorch's operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusible import Groups, QuantileBias, Router, SequenceLoss, SignBias, SwitchLoss, ZLoss
from fusible.functional import route

FAST = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
H, D = 6, torch.float64


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """The number of experts, and the arguments of a router."""
    count = draw(st.sampled_from([1, 2, 4]))
    experts = count * draw(st.integers(1, 5))
    keep = draw(st.integers(1, count))
    top_k = draw(st.integers(1, experts // count * keep))
    how: dict[str, Any] = {"num_experts": experts, "top_k": top_k, "scale": draw(st.sampled_from([1.0, 2.5]))}
    how["scores"] = draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]))
    how["normalize"] = top_k > 1 and draw(st.booleans())
    how["groups"] = Groups(count, keep, draw(st.integers(1, 3))) if count > 1 else 1
    parts = [SwitchLoss(0.5), ZLoss(0.1), SequenceLoss(0.3)]
    how["losses"] = tuple(part for part in parts if draw(st.booleans()))
    fits = how["scores"] == "sigmoid" and count == 1 and top_k < experts
    how["balance"] = draw(st.sampled_from([None, SignBias(0.1), *([QuantileBias(50)] if fits else [])]))
    return how


@st.composite
def routed(draw: st.DrawFn) -> tuple[Router, Tensor, Tensor]:
    """A router with a bias that has moved, tokens that differ, and which of them are valid."""
    how, tokens = draw(choices()), draw(st.integers(0, 12))
    torch.manual_seed(draw(st.integers(0, 1000)))
    router = Router(H, **how, dtype=D)
    if router.selection_bias is not None:
        router.selection_bias.normal_(std=0.2)
    x = torch.randn(tokens, H, dtype=D)
    return router, x, torch.rand(tokens) < draw(st.sampled_from([0.0, 0.5, 1.0]))


def call(router: Router, x: Tensor, **given: Any) -> Any:
    return router(x, sequences=torch.arange(x.shape[0]) // 3, **given)


@FAST
@given(routed())
def test_ids_weights_and_counts(drawn: tuple[Router, Tensor, Tensor]) -> None:
    """Ids are different and in range, counts are theirs, weights are positive and add up where they are normalised."""
    router, x, valid = drawn
    routes = call(router, x, valid=valid)
    ids, weights, rule = routes.top_k_index[valid], routes.top_k_weights, router.rule

    assert all(len(set(row)) == rule.top_k for row in ids.tolist())
    assert ((ids >= 0) & (ids < router.num_experts)).all()
    assert (routes.top_k_index[~valid] == -1).all()
    assert not weights[~valid].any()
    assert (weights[valid] > 0).all()
    assert torch.equal(routes.tokens_per_expert, torch.bincount(ids.flatten(), minlength=router.num_experts))
    if rule.normalize:
        torch.testing.assert_close(weights[valid].sum(-1), torch.full((len(ids),), rule.scale, dtype=D))
    if router.groups is not None:
        of_token = ids // (router.num_experts // router.groups.count)
        assert all(len(set(row)) <= router.groups.keep for row in of_token.tolist())


@FAST
@given(routed(), st.sampled_from([0.0, math.nan, math.inf]))
def test_pads_change_nothing(drawn: tuple[Router, Tensor, Tensor], pad: float) -> None:
    """A batch with pads is the batch without: routes, losses, gradients, counts of the balance."""
    router, x, valid = drawn
    x, sequences, found = x.masked_fill(~valid.unsqueeze(-1), pad), torch.arange(len(x)) // 3, []
    for tokens, of_valid, numbers in ((x, valid, sequences), (x[valid], None, sequences[valid])):
        routes = router(tokens, valid=of_valid, sequences=numbers)
        total = routes.top_k_weights.square().sum() + (0 if routes.loss is None else routes.loss)
        grad = torch.autograd.grad(total, routes.logits)[0]
        kept = valid if of_valid is not None else torch.ones(len(tokens), dtype=torch.bool)
        assert not grad[~kept].any()
        counted = [] if router.balance is None else [router.balance.count(routes, router.selection_bias)]
        loss = [] if routes.loss is None else [routes.loss.detach()]
        found.append([routes.top_k_index[kept], routes.top_k_weights[kept], grad[kept], *loss, *counted])

    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@FAST
@given(routed())
def test_own_ids_given_again_change_nothing(drawn: tuple[Router, Tensor, Tensor]) -> None:
    router, x, valid = drawn
    first = call(router, x, valid=valid)
    again = call(router, x, valid=valid, ids=first.top_k_index)

    for ours, theirs in zip(first, again, strict=True):
        assert ours is theirs or ours == theirs if not isinstance(ours, Tensor) else torch.equal(ours, theirs)


@FAST
@given(routed(), st.randoms())
def test_the_order_of_tokens_is_of_no_concern(drawn: tuple[Router, Tensor, Tensor], draw: Any) -> None:
    """Tokens in another order have the same routes; losses and counts are the same."""
    router, x, valid = drawn
    order = torch.tensor(draw.sample(range(len(x)), len(x)), dtype=torch.int64)
    numbers = torch.arange(len(x)) // 3
    first = router(x, valid=valid, sequences=numbers)
    other = router(x[order], valid=valid[order], sequences=numbers[order])

    assert torch.equal(other.top_k_index, first.top_k_index[order])
    torch.testing.assert_close(other.top_k_weights, first.top_k_weights[order])
    assert torch.equal(other.tokens_per_expert, first.tokens_per_expert)
    if first.loss is not None:
        torch.testing.assert_close(other.loss, first.loss)


@FAST
@given(choices(), st.randoms(), st.integers(0, 1000))
def test_the_order_of_experts_is_of_no_concern(how: dict[str, Any], draw: Any, seed: int) -> None:
    """Renamed experts of a choice without groups are chosen under their new names, with the same weights."""
    torch.manual_seed(seed)
    rule = {name: how[name] for name in ("scores", "normalize", "scale")}
    experts, top_k = how["num_experts"], how["top_k"]
    logits, bias = torch.randn(9, experts, dtype=D), 0.1 * torch.randn(experts, dtype=D)
    new = torch.tensor(draw.sample(range(experts), experts))
    first = route(logits, top_k, **rule, bias=bias)
    renamed = route(torch.empty_like(logits).index_copy(1, new, logits), top_k, **rule, bias=bias[new.argsort()])

    assert torch.equal(renamed.top_k_index, new[first.top_k_index])
    torch.testing.assert_close(renamed.top_k_weights, first.top_k_weights)


@FAST
@given(routed())
def test_all_scores_equal(drawn: tuple[Router, Tensor, Tensor]) -> None:
    """Logits that are all zero, or all so low that scores are zero, go to the first experts of the first groups."""
    router, x, _ = drawn
    if router.selection_bias is not None:
        router.selection_bias.zero_()
    groups, experts = router.groups, router.num_experts
    for level in (0.0, -1e4):
        logits = torch.full((len(x), experts), level, dtype=D)
        routes = route(logits, router.top_k, scores=router.rule.scores, groups=groups, bias=router.selection_bias)
        assert routes.top_k_index.tolist() == [[*range(router.top_k)]] * len(x)


def plain_weights(router: Router, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The weights at the ids, and the probabilities of all experts, from scores as their papers have them."""
    rule = router.rule
    if rule.scores == "softmax":
        scores = logits.exp() / logits.exp().sum(-1, keepdim=True)
    else:
        scores = 1 / (1 + (-logits).exp()) if rule.scores == "sigmoid" else (1 + logits.exp()).log().sqrt()
    chosen = scores.gather(-1, ids)
    weights = chosen / chosen.sum(-1, keepdim=True) if rule.normalize else chosen
    return rule.scale * weights, scores / scores.sum(-1, keepdim=True)


def plain_losses(router: Router, logits: Tensor, chances: Tensor, ids: Tensor, sequences: Tensor) -> Tensor:
    """The sum of the losses, sequence by sequence where one is of sequences."""
    experts, total = router.num_experts, logits.sum() * 0

    def balance(rows: Tensor) -> Tensor:
        slots = torch.bincount(ids[rows].flatten(), minlength=experts)
        return experts * (slots / slots.sum() * chances[rows].mean(0)).sum()

    for loss in router.losses if len(ids) else ():
        if isinstance(loss, ZLoss):
            total = total + loss.beta * logits.exp().sum(-1).log().square().mean()
        elif isinstance(loss, SwitchLoss):
            total = total + loss.alpha * balance(torch.ones_like(sequences, dtype=torch.bool))
        else:
            of_each = [balance(sequences == number) for number in sequences.unique()]
            total = total + loss.alpha * torch.stack(of_each).mean()
    return total


@FAST
@given(routed())
def test_gradients_are_those_of_autograd(drawn: tuple[Router, Tensor, Tensor]) -> None:
    """Weights, losses, and the gradients of tokens and gate, against plain formulas of the valid tokens alone."""
    router, x, valid = drawn
    x.requires_grad_()
    routes = call(router, x, valid=valid)
    ids, numbers = routes.top_k_index[valid], (torch.arange(len(x)) // 3)[valid]
    logits = x[valid] @ router.weight.T
    weights, chances = plain_weights(router, logits, ids)
    loss = plain_losses(router, logits, chances, ids, numbers)
    d_weights = torch.linspace(-1, 2, routes.top_k_weights.numel(), dtype=D).view_as(routes.top_k_weights)
    ours = (d_weights * routes.top_k_weights).sum() + (0 if routes.loss is None else routes.loss)
    theirs = (d_weights[valid] * weights).sum() + loss

    torch.testing.assert_close(routes.top_k_weights[valid], weights)
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(total, [x, router.weight]) for total in (ours, theirs)]
    torch.testing.assert_close(*grads)


ODD = [0.0, 0.0, 1.0, 1.0, -3.0, 40.0, 41.0, -800.0, math.inf, -math.inf, -math.inf, math.nan]


@st.composite
def odd_logits(draw: st.DrawFn) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a choice, and logits of a few values, many of them equal or no numbers."""
    how = draw(choices())
    row = st.lists(st.sampled_from(ODD), min_size=how["num_experts"], max_size=how["num_experts"])
    rows = draw(st.lists(row, min_size=0, max_size=5))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    return how, torch.tensor(rows, dtype=dtype).view(len(rows), how["num_experts"])


@FAST
@given(odd_logits(), st.booleans())
def test_odd_logits(drawn: tuple[dict[str, Any], Tensor], biased: bool) -> None:
    """NaN first, then the higher logit, then the lower expert; -inf gets no weight and no gradient."""
    how, logits = drawn
    experts, top_k, scale, logits = how["num_experts"], how["top_k"], how["scale"], logits.requires_grad_()
    rule = {name: how[name] for name in ("scores", "normalize", "scale")}
    groups = how["groups"] if isinstance(how["groups"], Groups) else None
    bias = torch.linspace(0.2, -0.2, experts, dtype=torch.float32) if biased else None
    routes = route(logits, top_k, **rule, bias=bias, groups=groups)
    d_weights = torch.linspace(1, 2, top_k, dtype=routes.top_k_weights.dtype)
    (grads,) = torch.autograd.grad((routes.top_k_weights * d_weights).sum(), logits)

    for row, ids, weights, grad in zip(
        logits.tolist(), *map(Tensor.tolist, (routes[0], routes[1], grads)), strict=True
    ):
        assert len(set(ids)) == top_k
        assert set(ids) <= set(range(experts))
        if groups is None and bias is None:
            assert ids == sorted(range(experts), key=lambda e: (not math.isnan(row[e]), -row[e], e))[:top_k]
        if any(math.isnan(x) or x == math.inf for x in row):
            continue
        never = [row[e] == -math.inf for e in ids]
        assert all(weight == 0 if out else 0 <= weight < math.inf for weight, out in zip(weights, never, strict=True))
        assert all(map(math.isfinite, grad))
        assert not any(g for x, g in zip(row, grad, strict=True) if x == -math.inf)
        if how["normalize"]:
            assert math.isclose(sum(weights), 0 if all(never) else scale, rel_tol=1e-5)
