"""Checks of the choice of experts and its gradient, against the reference in float64, on a GPU or its emulation."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible import Groups, MoE, Routes
from fusible.functional import route
from fusible.ops.kernels.hopper import choice as kernel
from fusible.ops.kernels.problems.choice import ChoiceRule, Choosing, ChoosingBackward, Chosen
from fusible.ops.kernels.pytorch import choice as reference


@dataclass(frozen=True)
class Case:
    """Sizes and rules; ``groups`` are their number, how many are kept, and by how many of their best."""

    experts: int
    top_k: int
    tokens: int = 21
    scores: str = "softmax"
    normalize: bool = True
    groups: tuple[int, int, int] = (1, 1, 1)
    biased: bool = False
    pads: bool = False
    given: bool = False
    tallied: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def rule(self) -> ChoiceRule:
        return ChoiceRule(self.top_k, self.scores, self.normalize, 2.5, *self.groups, tallied=self.tallied)


def numbers(device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def problem(device: str, case: Case) -> Choosing:
    """Tokens whose keys lie so far apart that every float32 arithmetic orders them as float64 does."""
    bias = 0.1 * numbers("cpu", case.experts, seed=1) if case.biased else None
    drawn = [torch.empty(0, case.experts, dtype=case.dtype)]
    while (missing := case.tokens - sum(map(len, drawn))) > 0:
        logits = _logits(case, missing, seed=2 * len(drawn) - 2)
        drawn.append(logits[is_decided(Choosing(logits, case.rule, bias, None, None))])
    valid = torch.arange(case.tokens, device=device) % 6 > 0 if case.pads else None
    given = _given(device, case) if case.given else None
    return Choosing(torch.cat(drawn).to(device), case.rule, None if bias is None else bias.to(device), valid, given)


def _logits(case: Case, tokens: int, seed: int) -> Tensor:
    logits = 2 * numbers("cpu", tokens, case.experts, seed=seed)
    if case.dtype == torch.float32:
        return logits
    ranks = logits.argsort(-1).argsort(-1)  # all different in 16 bits, too
    return ((ranks - case.experts // 2) / 16.0).to(case.dtype)


def keys_and_bounds(p: Choosing) -> tuple[Tensor, Tensor]:
    """The keys that the choice compares, in float64 [T, E], and how far float32 may be from them.

    Logits are compared as they are. A score s is the exponential of its logarithm. With u = 2^-24, exp, log and log1p
    are right within 2 u (1 ulp). Of softmax, ``exp(x - top) / total``, the difference is within |log s| u, the sum of
    up to 4096 exponentials in a tree of depth 41 within (41 + 2 + log 4096) u; its inverse and the product add 2 u.
    Logarithms of the other scores are within (3 + 2 |log s|) u. The exponential adds 2 u; the bias, one rounding.
    """
    logits, rule, unit = p.logits.double(), p.rule, 2.0**-24
    if p.bias is None and rule.groups == 1:
        return logits, torch.zeros_like(logits)
    logs, fixed = reference.log_scores(logits, rule.scores), torch.tensor(5.0).double()
    if rule.scores == "softmax":
        total = logits.logsumexp(-1, keepdim=True)
        logs, fixed = logs - total, torch.tensor(72.0).double()
    scores = logs.exp()
    keys = scores if p.bias is None else scores + p.bias.double()
    return keys, unit * (scores * (fixed + 2 * logs.abs()) + keys.abs())


def is_decided(p: Choosing) -> Tensor:
    """Whether float32 must make the choice of float64, bool [T]: all keys lie further apart than their bounds."""
    keys, bounds = keys_and_bounds(p)
    rule, decided = p.rule, torch.ones(len(keys), dtype=torch.bool)
    if not bounds.any():
        return decided
    if rule.groups > 1:
        best = keys.view(len(keys), rule.groups, -1).topk(min(rule.best, keys.shape[1] // rule.groups)).values
        sums = best.sum(-1).sort(-1, descending=True).values
        gap = sums[:, rule.keep - 1] - sums[:, rule.keep] if rule.keep < rule.groups else torch.inf
        decided = gap > 2 * rule.best * (bounds.amax(-1) + 2.0**-24 * sums.abs().amax(-1))
        keys = reference._within_groups(keys, rule)
    highest = keys.topk(min(rule.top_k + 1, keys.shape[1])).values
    return decided & (-highest.diff(dim=-1) > 2 * bounds.amax(-1, keepdim=True)).all(-1)


def _given(device: str, case: Case) -> Tensor:
    """Missing rows, ids of no expert, and some twice."""
    ids = torch.randint(case.experts, (case.tokens, case.top_k), generator=torch.Generator().manual_seed(2)).to(device)
    ids[::4], ids[1, 1:], ids[2], ids[3, 0] = -1, -1, case.experts - 1, case.experts
    return ids


def poisoned(p: Choosing) -> Chosen:
    """Results that hold what no kernel writes."""
    (tokens, experts), device = p.logits.shape, p.logits.device

    def whole(*shape: int) -> Tensor:
        return torch.full(shape, -7, dtype=torch.int64, device=device)

    def real(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, device=device)

    k = p.rule.top_k
    sums = (whole(experts + 1), real(experts), real(1)) if p.rule.tallied else (None, None, None)
    return Chosen(real(tokens, k), whole(tokens, k), whole(experts), *sums)


def wide(p: Choosing) -> Choosing:
    return Choosing(p.logits.double(), p.rule, None if p.bias is None else p.bias.double(), p.valid, p.fixed_ids)


def chosen(p: Choosing) -> Chosen:
    """By our own kernel."""
    assert (why := kernel.refusal(p)) is None, why
    out = poisoned(p)
    kernel.forward(p, out)
    return out


def gradient(p: Choosing, ids: Tensor, *d: Tensor | None) -> Tensor:
    """By our own kernel."""
    out = torch.full_like(p.logits, torch.nan)
    kernel.backward(ChoosingBackward(p.logits, p.rule, ids, *d), out)
    return out


def check(device: str, case: Case) -> None:
    """The choice and its counts exactly; weights, sums and gradients within the rounding of float32."""
    p = problem(device, case)
    out, true = chosen(p), reference.forward(wide(p))
    assert torch.equal(out.ids, true.ids)
    assert torch.equal(out.counts, true.counts)
    torch.testing.assert_close(out.weights.double(), true.weights, rtol=4e-5, atol=1e-7)
    if case.tallied:
        assert torch.equal(out.slots, true.slots)
        torch.testing.assert_close(out.sums.double(), true.sums, rtol=4e-5, atol=1e-6)
        torch.testing.assert_close(out.squares.double(), true.squares, rtol=2e-5, atol=1e-6)
    check_gradient(p, case, out.ids)


def check_gradient(p: Choosing, case: Case, ids: Tensor) -> None:
    device = str(p.logits.device)
    d_weights, d_sums = numbers(device, *ids.shape, seed=3), numbers(device, case.experts, seed=4)
    d_squares = torch.tensor([0.01], device=device)
    d = (d_weights, d_sums, d_squares) if case.tallied else (d_weights, None, None)
    out = gradient(p, ids, *d)
    true = reference.backward(ChoosingBackward(p.logits.double(), p.rule, ids, *_doubled(d)))
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 4e-6}
    if case.dtype != torch.float32:
        tolerance = {"rtol": torch.finfo(case.dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(out.double(), true, **tolerance)
    if p.valid is not None:
        assert not out[~p.valid].any()


def _doubled(d: tuple[Tensor | None, ...]) -> list[Any]:
    return [None if t is None else t.double() for t in d]


def check_near_ties(device: str, scores: str, experts: int) -> None:
    """Keys that float32 can hardly tell apart: each choice is within the bounds of the best, none is made twice.

    Order statistics move by no more than the keys do: the j-th choice has a key within twice the bound of the j-th
    highest. Where keys are the same to the bit, the lower expert comes first.
    """
    steps = torch.randint(-9, 10, (40, experts), generator=torch.Generator().manual_seed(0))
    logits = (1 + steps * 2.0**-23).to(device)
    bias = 0.1 * numbers(device, 3, seed=1).repeat(experts)[:experts]
    p = Choosing(logits, ChoiceRule(8, scores, True, 1.0), bias, None, None)
    keys, bounds = keys_and_bounds(p)
    highest = keys.sort(-1, descending=True).values[:, :8]
    for ids in (chosen(p).ids, reference.forward(p).ids):
        assert all(len(set(row)) == 8 for row in ids.tolist())
        assert ((keys.gather(-1, ids) - highest).abs() <= 2 * bounds.amax(-1, keepdim=True)).all()
        same = (logits.gather(-1, ids).diff(dim=-1) == 0) & (bias[ids].diff(dim=-1) == 0)
        assert (ids.diff(dim=-1)[same] > 0).all()
        assert same.any()


def check_odd(device: str, scores: str, experts: int, by_scores: bool) -> None:
    """NaN, infinities, ties, scores that saturate or underflow."""
    x = 2 * numbers(device, 9, experts)
    x[0], x[1], x[2, 7], x[3, 5:], x[4], x[5] = math.nan, -math.inf, math.nan, -math.inf, 0.0, -300.0
    x[6] = torch.arange(float(experts), device=device) + 40  # sigmoid is 1 in all places
    x[7, 3], x[7, 9] = math.inf, math.inf
    bias = torch.zeros(experts, device=device) if by_scores else None
    p = Choosing(x, ChoiceRule(8, scores, True, 1.0, tallied=True), bias, None, None)
    out, true = chosen(p), reference.forward(p)
    assert torch.equal(out.ids, true.ids)
    assert all(len(set(row)) == 8 for row in out.ids.tolist())
    if not by_scores:
        assert out.ids[4].tolist() == list(range(8))
        assert out.ids[6].tolist() == list(range(experts - 1, experts - 9, -1))
    torch.testing.assert_close(out.weights, true.weights, rtol=1e-4, atol=1e-7, equal_nan=True)
    assert torch.equal(out.slots, true.slots)
    torch.testing.assert_close(out.sums, true.sums, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.squares, true.squares, rtol=1e-4, atol=1e-6)
    d = [torch.ones_like(out.weights), torch.ones(experts, device=device), torch.ones(1, device=device)]
    d[0][[0, 2, 7]] = 0  # tokens without a gradient have none, be they NaN
    grad = gradient(p, out.ids, *d)
    true_grad = reference.backward(ChoosingBackward(p.logits, p.rule, out.ids, *d))
    torch.testing.assert_close(grad, true_grad, rtol=1e-3, atol=1e-3)
    assert grad.isfinite().all()


def check_large(device: str, biased: bool) -> None:
    """Large logits, whose logsumexp has no bits left for their differences."""
    for level in (-3e4, 3e4, 3e8, -1e38):
        x = level + 2 * numbers(device, 5, 60)
        bias = torch.zeros(60, device=device) if biased else None
        p = Choosing(x, ChoiceRule(8, "softmax", False, 1.0), bias, None, None)
        out = chosen(p)
        true = x.double().softmax(-1)
        torch.testing.assert_close(out.weights.double(), true.gather(-1, out.ids), rtol=4e-6, atol=0)
        assert (true.gather(-1, out.ids) >= true.topk(8).values * (1 - 4e-6)).all()
        torch.testing.assert_close(reference.forward(p).weights, out.weights, rtol=4e-6, atol=0)
        d = numbers(device, 5, 8, seed=3), None, None
        exact = reference.backward(ChoosingBackward(x.double(), p.rule, out.ids, *_doubled(d)))
        torch.testing.assert_close(gradient(p, out.ids, *d).double(), exact, rtol=1e-4, atol=1e-6)


def check_beside_odd(device: str, scores: str, normalize: bool) -> None:
    """Beside NaN, no expert and a logit of -infinity have the weight 0. A logit of +infinity is the first choice."""
    x, given = numbers(device, 4, 12), torch.full((4, 3), -1, device=device)
    x[0, 4], x[0, 7], x[1, 9], x[2, 0], x[2, 5], given[0] = math.nan, -math.inf, math.inf, math.nan, math.inf, 4
    given[0, 1:] = torch.tensor([7, -1], device=device)
    p = Choosing(x, ChoiceRule(3, scores, normalize, 1.0), torch.zeros(12, device=device), None, given)
    out, true = chosen(p), reference.forward(p)
    for weights, ids in ((out.weights, out.ids), (true.weights, true.ids)):
        assert weights[0].isnan().tolist() == [True, False, False]
        assert not weights[0, 1:].any()
        assert ids[1, 0] == 9
    assert torch.equal(out.ids, true.ids)
    torch.testing.assert_close(out.weights, true.weights, rtol=1e-4, atol=1e-7, equal_nan=True)
    d = torch.ones_like(out.weights), None, None
    ours, true_grad = gradient(p, out.ids, *d), reference.backward(ChoosingBackward(x, p.rule, out.ids, *d))
    assert torch.equal(ours[[1, 3]].isnan(), true_grad[[1, 3]].isnan())


def check_calls_of_a_layer(
    device: str, how: dict[str, Any], shared: int | None, engine: Executor | None = None, layer: MoE | None = None
) -> MoE:
    """The first, the captured and the replayed call give the same bits: output, loss, counts and all gradients.

    Args:
        engine: runs the backward in a thread of its own, as autograd does on a GPU.
        layer: one that this function has called before; its weights are those of a new one.
    """
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden": 64, "ffn": 32, "experts": 8, "top_k": 2, "shared_ffn": shared}
    fresh = MoE(**sizes, balance_loss=0.1, dtype=torch.bfloat16, device=device, **how)
    x = torch.randn(33, 64).to(device, torch.bfloat16).requires_grad_()
    first, layer = _results(fresh, x, engine), layer or fresh
    for call in range(2, 4):
        again = _results(layer, x, engine)
        assert (call, [name for name in first if not torch.equal(first[name], again[name])]) == (call, [])
    return layer


def _results(layer: MoE, x: Tensor, engine: Executor | None) -> dict[str, Tensor]:
    made = list[Routes]()
    with layer.router.register_forward_hook(lambda router, arguments, routes: made.append(routes)):
        y, loss, counts = layer(x)
    assert loss is not None
    of_router = {"logits": made[0].logits, "weights": made[0].top_k_weights}
    leaves, total = {"x": x, **of_router, **dict(layer.named_parameters())}, y.square().mean() + loss
    gradients = partial(torch.autograd.grad, total, [*leaves.values()])
    grads = gradients() if engine is None else engine.submit(gradients).result()
    return {"y": y.detach(), "loss": loss.detach(), "counts": counts, **dict(zip(leaves, grads, strict=True))}


def check_one_graph(device: str, backend: str) -> None:
    """Compiled routes, with and without groups: those of eager code, from a single graph."""
    logits, bias = numbers(device, 33, 16).requires_grad_(), numbers(device, 16, seed=1).abs()
    for how in ({}, {"scores": "sigmoid", "scale": 0.5, "bias": bias, "groups": Groups(4, keep=2)}):
        call, found = partial(route, top_k=3, **how), []
        for each in (call, torch.compile(call, backend=backend, fullgraph=True)):
            routes = each(logits)
            found.append([*routes[:3], *torch.autograd.grad(routes.top_k_weights.square().sum(), logits)])
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager)


def check_alone(device: str, case: Case) -> None:
    """A token's bits depend on no other token; those of sums on no order of threads."""
    p = problem(device, case)
    whole = chosen(p)
    for rows in (slice(7, 8), slice(3, 19)):
        part = chosen(Choosing(p.logits[rows].contiguous(), p.rule, p.bias, None, None))
        assert torch.equal(part.ids, whole.ids[rows])
        assert torch.equal(part.weights, whole.weights[rows])
    again = chosen(p)
    assert all(torch.equal(*pair) for pair in zip(whole, again, strict=True))
