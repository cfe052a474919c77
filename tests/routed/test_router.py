"""Parts of a router: losses, biases that even out loads, logit biases, recorded and given routes, against formulas."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fusible import (
    ArgumentError,
    GlobalLoss,
    Groups,
    MoE,
    QuantileBias,
    Router,
    SequenceLoss,
    SignBias,
    SwitchLoss,
    ZLoss,
    config,
    record_routes,
    update_biases,
)
from fusible.functional import route
from fusible.ops.kernels.problems.choice import SCORES, ChoiceRule
from fusible.ops.layers import balance
from fusible.ops.routed.choose import Choose

T, H, E, K = 12, 6, 8, 3
D = torch.float64
ALL = (SwitchLoss(0.5), SequenceLoss(0.25), ZLoss(0.125))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def router(*losses: Any, **how: Any) -> Router:
    torch.manual_seed(0)
    return Router(H, E, K, losses=losses, **{"dtype": D, **how})


def balance_by_hand(chances: Tensor, ids: list[list[int]]) -> Tensor:
    """E times the sum over experts of the share of slots and the mean probability."""
    slots = [expert for row in ids for expert in row if 0 <= expert < E]
    shares = torch.tensor([slots.count(e) / max(1, len(slots)) for e in range(E)], dtype=D)
    return E * (shares * chances.mean(0)).sum()


def by_hand(loss: Any, logits: Tensor, ids: Tensor, scores: str, sequences: list[int]) -> Tensor:
    of = {"softmax": logits.exp(), "sigmoid": logits.sigmoid(), "sqrtsoftplus": (1 + logits.exp()).log().sqrt()}[scores]
    chances = of / of.sum(-1, keepdim=True)
    if isinstance(loss, ZLoss):
        return loss.beta * logits.exp().sum(-1).log().square().mean()
    if isinstance(loss, SwitchLoss):
        return loss.alpha * balance_by_hand(chances, ids.tolist())
    rows = [[i for i, s in enumerate(sequences) if s == own] for own in sorted(set(sequences))]
    return loss.alpha * torch.stack([balance_by_hand(chances[own], ids[own].tolist()) for own in rows]).mean()


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("loss", ALL, ids=lambda loss: type(loss).__name__)
def test_losses_are_those_of_the_formulas(scores: str, loss: Any) -> None:
    of_token = [3, 3, 7, 7, 7, 3, 0, 0, 3, 9, 9, 0]
    x, part = numbers(T, H), router(loss, scores=scores)
    routes = part(x, sequences=torch.tensor(of_token))
    expected = by_hand(loss, x @ part.weight.T, routes.top_k_index, scores, of_token)

    torch.testing.assert_close(routes.loss, expected)
    grads = [torch.autograd.grad(value, part.weight)[0] for value in (routes.loss, expected)]
    torch.testing.assert_close(*grads)


def test_sequences_of_one_length_are_given_by_it() -> None:
    x, part = numbers(T, H), router(SequenceLoss(1.0))

    assert torch.equal(part(x, sequences=4).loss, part(x, sequences=torch.arange(T) // 4).loss)


def test_losses_add_up() -> None:
    x = numbers(T, H)
    alone = [router(loss)(x, sequences=4).loss for loss in ALL]

    torch.testing.assert_close(router(*ALL)(x, sequences=4).loss, sum(alone))


@pytest.mark.parametrize("pad", [0.0, 3.0])
def test_losses_leave_out_tokens_that_are_not_valid(pad: float) -> None:
    x, valid, sequences = numbers(T, H), torch.arange(T) % 4 != 1, torch.arange(T) // 5
    padded, part = x.masked_fill(~valid.unsqueeze(-1), pad), router(*ALL)
    ours = part(padded, valid=valid, sequences=sequences).loss
    theirs = part(x[valid], sequences=sequences[valid]).loss

    torch.testing.assert_close(ours, theirs)


def test_a_sequence_of_pads_alone_is_left_out() -> None:
    x, valid = numbers(T, H), torch.arange(T) >= 4
    part = router(SequenceLoss(1.0))

    torch.testing.assert_close(part(x, valid=valid, sequences=4).loss, part(x[valid], sequences=4).loss)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_losses_leave_out_tokens_that_are_no_numbers(odd: float) -> None:
    logits = numbers(T, E)
    logits[2, 5], logits[4] = odd, -math.inf
    regular = torch.tensor([t not in (2, 4) for t in range(T)])
    leaf = logits.clone().requires_grad_()
    ours, theirs = (chosen(each, tallied=True) for each in (leaf, logits[regular]))
    (grad,) = torch.autograd.grad(ours["sums"].square().sum() + ours["squares"].sum(), leaf)

    assert all(torch.equal(ours[name], theirs[name]) for name in ("slots", "squares"))
    torch.testing.assert_close(ours["sums"], theirs["sums"])
    assert not grad[~regular].any()
    assert grad[regular].isfinite().all()


@pytest.mark.parametrize("how", [{}, {"valid": torch.zeros(T, dtype=torch.bool)}], ids=["no tokens", "pads alone"])
def test_without_tokens_losses_are_zero(how: dict[str, Any]) -> None:
    part, x = router(*ALL, balance=SignBias(1.0)), numbers(T if how else 0, H)
    routes = part(x, sequences=4, **how)
    routes.loss.backward()

    assert routes.loss == 0
    assert not part.weight.grad.any()


def chosen(logits: Tensor, scores: str = "softmax", normalize: bool = True, tallied: bool = False, **how: Any) -> Any:
    op = Choose(ChoiceRule(K, scores, normalize, 2.5, tallied=tallied))
    return dict(zip(("y", *op.extra_outputs), op(logits, **how), strict=True))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_those_of_finite_differences(scores: str, normalize: bool) -> None:
    ids = torch.tensor([[1, 1, 4], [-1, -1, -1], [0, -1, E], *[[7, 2, 0]] * (T - 3)])
    valid = torch.arange(T) != 5

    def results(logits: Tensor) -> list[Tensor]:
        out = chosen(logits, scores, normalize, True, ids=ids, valid=valid)
        return [out[name] for name in ("y", "sums", "squares")]

    assert torch.autograd.gradcheck(results, numbers(T, E).requires_grad_())


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_experts_that_are_ruled_out_have_no_gradient(scores: str, normalize: bool) -> None:
    logits = numbers(T, E)
    logits[:, 2:] = -math.inf
    leaf = logits.requires_grad_()
    out = chosen(leaf, scores, normalize, True)
    (grad,) = torch.autograd.grad(out["y"].square().sum() + out["sums"].square().sum() + out["squares"].sum(), leaf)

    assert not out["y"][:, 2:].any()
    assert grad.isfinite().all()
    assert not grad[:, 2:].any()


@pytest.mark.parametrize("scores", SCORES)
def test_equal_logits_go_to_the_lower_expert(scores: str) -> None:
    assert chosen(torch.zeros(T, E), scores)["top_k_index"].tolist() == [[0, 1, 2]] * T
    saturated = torch.linspace(30, 37, E).repeat(T, 1)  # of which sigmoids are all 1
    assert chosen(saturated, scores)["top_k_index"].tolist() == [[7, 6, 5]] * T


def test_a_sign_bias_may_be_centred() -> None:
    load, bias = torch.tensor([9, 1, 1, 1]), torch.zeros(4)

    assert SignBias(0.5).next_bias(bias, load, 1).tolist() == [-0.5, 0.5, 0.5, 0.5]
    assert SignBias(0.5, centre=True).next_bias(bias, load, 1).tolist() == [-0.75, 0.25, 0.25, 0.25]


def needed(logits: Tensor, bias: Tensor, k: int) -> Tensor:
    """The bias at which each token would just choose each expert."""
    s = logits.sigmoid()
    return (s + bias).sort(-1, descending=True).values[:, k : k + 1] - s


def test_a_quantile_bias_is_the_quantile() -> None:
    part, bins = QuantileBias(), 1000
    logits, bias = numbers(400, E) + torch.linspace(-1, 1, E), torch.linspace(-0.2, 0.2, E)
    found = part.next_bias(bias, part.count(route(logits, K, scores="sigmoid", bias=bias), bias), K)
    exact = torch.quantile(needed(logits, bias, K), K / E, dim=0)
    width = float(bias.max() - bias.min() + 2) / bins

    assert (found - (exact - exact.mean())).abs().max() < 2 * width
    assert abs(float(found.mean())) < 1e-6


def test_histograms_of_microbatches_add_up() -> None:
    part, bias, logits = QuantileBias(50), torch.zeros(E), numbers(40, E)
    whole, first, second = (
        part.count(route(rows, K, scores="sigmoid", bias=bias), bias) for rows in (logits, logits[:15], logits[15:])
    )

    assert torch.equal(whole, first + second)
    assert whole.sum(-1).tolist() == [40] * E


class Largest(TorchDispatchMode):
    """Notes the most numbers in a tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.most = max(self.most, tensor.numel())
        return out


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_a_histogram_makes_no_temporary_of_all_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part, bias, logits = QuantileBias(5), torch.linspace(-0.1, 0.1, E), numbers(tokens, E)
    routes = route(logits, K, scores="sigmoid", bias=bias)
    whole = part.count(routes, bias)
    monkeypatch.setattr(balance, "_NUMBERS_AT_ONCE", 7 * E)
    with Largest() as made:
        assert torch.equal(part.count(routes, bias), whole)

    assert made.most <= 7 * E


def test_a_quantile_bias_leaves_out_pads_and_tokens_that_are_no_numbers() -> None:
    part, bias, logits = QuantileBias(50), torch.zeros(E), numbers(T, E)
    valid = torch.arange(T) != 3
    logits[7, 1] = math.nan
    counts = part.count(route(logits, K, scores="sigmoid", bias=bias, valid=valid), bias)

    assert counts.sum(-1).tolist() == [T - 2] * E
    assert torch.equal(part.next_bias(bias, torch.zeros_like(counts), K), bias)


@pytest.mark.parametrize(("balance", "steps"), [(SignBias(0.02), 100), (QuantileBias(), 5)], ids=["sign", "quantile"])
def test_balances_even_out_the_load(balance: Any, steps: int) -> None:
    torch.manual_seed(0)
    layer = MoE(H, 8, E, K, scores="sigmoid", balance=balance)
    x = torch.randn(512, H) + 1
    before = layer(x).tokens_per_expert
    for _ in range(steps):
        layer(x).y.sum().backward()
        layer.update_bias()
    after = layer(x).tokens_per_expert

    assert before.max() > 1.4 * before.double().mean()
    assert after.max() < 1.15 * after.double().mean()


def test_all_biases_are_updated_with_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    balances = [SignBias(1e-3), QuantileBias(20)]
    layers = nn.ModuleList(MoE(H, 8, E, K, scores="sigmoid", balance=balance) for balance in balances)
    alone, reductions = nn.ModuleList(MoE(H, 8, E, K, scores="sigmoid", balance=balance) for balance in balances), []
    alone.load_state_dict(layers.state_dict())
    x = torch.randn(T, H)
    for layer in (*layers, *alone):
        layer(x).y.sum().backward()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: reductions.append(total.mul_(2)))
    update_biases(layers, group="all")
    for layer in alone:
        layer.load.mul_(2)
        layer.update_bias()

    assert len(reductions) == 1
    for ours, theirs in zip(layers, alone, strict=True):
        assert torch.equal(ours.router.selection_bias, theirs.router.selection_bias)
        assert ours.router.selection_bias.any()
        assert not ours.load.any()


def test_a_bias_of_the_logits_is_a_parameter() -> None:
    part, x = router(bias=True), numbers(T, H)
    with torch.no_grad():
        part.bias.copy_(torch.linspace(-3, 3, E))
    routes = part(x)
    expected = route(F.linear(x, part.weight, part.bias), K)
    grads = [torch.autograd.grad(r.top_k_weights.square().sum(), part.bias)[0] for r in (routes, expected)]

    assert torch.equal(routes.top_k_index, expected.top_k_index)
    torch.testing.assert_close(*grads)
    assert dict(part.named_parameters()).keys() == {"weight", "bias"}


def test_the_gate_keeps_tokens_as_they_are() -> None:
    """No float32 copy of [T, H] tokens, or of the weight, is saved for the backward."""
    part, x, kept = router(dtype=torch.bfloat16), torch.randn(T, H).bfloat16().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        routes = part(x)
    routes.top_k_weights.square().sum().backward()

    assert kept
    assert not [t for t in kept if t.dtype == torch.float32 and t.shape[-1] == H]
    leaves = [t.detach().requires_grad_() for t in (part.weight, x)]
    expected = route(F.linear(leaves[1].float(), leaves[0].float()), K)
    grads = torch.autograd.grad(expected.top_k_weights.square().sum(), leaves)
    torch.testing.assert_close((part.weight.grad, x.grad), grads)


class Model(nn.Module):
    """Two routed layers, in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (MoE(H, 8, E, K) for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        for i, layer in enumerate((self.first, self.second)):
            x = x + layer(x, ids=None if ids is None else ids[..., i, :]).y
        return x


def test_a_recorded_run_is_replayed() -> None:
    model, x = Model(), torch.randn(2, 5, H)
    with record_routes(model) as record:
        y = model(x)
    ids = record.ids
    with torch.no_grad():
        model.first.router.weight.add_(1.0)
    moved, given = model(x), model(x, ids.view(2, 5, 2, K))
    given.square().sum().backward()

    assert record.names == ("first.router", "second.router")
    assert ids.dtype == torch.int16
    assert ids.shape == (10, 2, K)
    assert not torch.equal(moved, y)
    assert not torch.equal(given, y)
    assert model.first.router.weight.grad.any()
    with record_routes(model) as again:
        model(x, ids.view(2, 5, 2, K))
    assert torch.equal(again.ids, ids)


def test_a_router_records_its_calls() -> None:
    part, x = router(), numbers(T, H)
    with part.record() as record:
        first, second = part(x), part(x[:5], valid=torch.arange(5) != 2)
    part(x)

    assert torch.equal(record.ids, torch.cat([first.top_k_index, second.top_k_index]).to(torch.int16))
    assert record.ids[T + 2].tolist() == [-1] * K
    assert torch.equal(part(x, ids=record.ids[:T]).top_k_weights, first.top_k_weights)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_call_is_recorded_once(reentrant: bool) -> None:
    model, x = Model(), torch.randn(T, H, requires_grad=True)
    with record_routes(model) as record:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    with record_routes(model) as again:
        model(x)

    assert torch.equal(record.ids, again.ids)


def test_a_record_of_unequal_calls_says_so() -> None:
    model = Model()
    with record_routes(model) as record:
        model.first(torch.randn(4, H))

    with pytest.raises(RuntimeError, match=r"as many as the others, got first\.router: 4, second\.router: 0"):
        record.ids  # noqa: B018


def test_a_record_of_other_numbers_of_choices_says_so() -> None:
    routers = nn.ModuleList(Router(H, E, k) for k in (2, K))
    with record_routes(routers) as record:
        for part in routers:
            part(torch.randn(4, H))

    with pytest.raises(RuntimeError, match="record: all routers must make as many choices a token, got 0: 2, 1: 3"):
        record.ids  # noqa: B018


def test_a_record_of_no_router_says_so() -> None:
    with record_routes(nn.Linear(H, H)) as record, pytest.raises(RuntimeError, match="as the others, got no router"):
        record.ids  # noqa: B018


def test_ids_above_16_bits_are_recorded() -> None:
    part = Router(2, 2**15 + 1, 1)
    with torch.no_grad():
        part.weight.zero_()[-1] = 1.0
    with part.record() as record:
        part(torch.ones(3, 2))

    assert record.ids.tolist() == [[2**15]] * 3


def test_a_layer_takes_the_routes_of_another_router() -> None:
    layer, other, x = (
        MoE(H, 8, E, K, balance_loss=1.0),
        router(SwitchLoss(2.0), dtype=torch.float32),
        torch.randn(2, 6, H),
    )
    routes = other(x.view(-1, H))
    output = layer(x, routes=routes)
    expected = layer.experts(x.view(-1, H), top_k_index=routes.top_k_index, top_k_weights=routes.top_k_weights)

    assert torch.equal(output.y.view(-1, H), expected)
    assert output.balance_loss is routes.loss
    assert output.tokens_per_expert is routes.tokens_per_expert


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: router()(numbers(2, T, H)), "Router: x must be floating-point tokens [T, 6], got float64 [2, 12, 6]"),
    (lambda: router()(numbers(T, H).long()), "Router: x must be floating-point tokens [T, 6], got int64 [12, 6]"),
    (lambda: router()([[0.0] * H]), "Router: x must be floating-point tokens [T, 6], got a list"),
    (
        lambda: Router(H, E, K, losses=ZLoss(0.1)),
        "Router: losses must be a sequence of losses, such as (SwitchLoss(0.01),), got",
    ),
    (lambda: Router(H, E, K, losses=torch.tensor(0.1)), "Router: losses must be a sequence of losses"),
    (lambda: Router(H, E, K, losses=(0.01,)), "Router: losses must be a sequence of losses"),
    (lambda: Router(H, E, K, losses=(ZLoss,)), "Router: losses must be a sequence of losses"),
    (lambda: MoE(H, 8, E, K, balance_loss=0.1, losses=0.1), "MoE: losses must be a sequence of losses"),
    (lambda: router(balance=1e-3), "Router: balance must be one such as SignBias(1e-3), got 0.001"),
    (lambda: router(balance=SignBias), "Router: balance must be one such as SignBias(1e-3), got <class"),
    (lambda: router(groups=Groups(4, 2), top_groups=2), "says how many are kept; leave top_groups=2 out"),
    (
        lambda: router()(numbers(T, H), ids=torch.zeros(T, K)),
        "Router: ids must be whole numbers [T, top_k], T=12, top_k=3, -1 for a missing row; got float32 [12, 3]",
    ),
    (
        lambda: router()(numbers(T, H), valid=torch.zeros(T)),
        "Router: valid must be bool [T], True for a real token, T=12; got float32 [12]; a padding mask is valid=~mask",
    ),
    (
        lambda: router(SequenceLoss(1.0))(numbers(T, H)),
        "Router: SequenceLoss needs sequences, the number of each token's sequence, whole numbers [T], T=12, or the "
        "length of all",
    ),
    (
        lambda: router(SequenceLoss(1.0))(numbers(T, H), sequences=5),
        "Router: sequences must be whole numbers [T], T=12, or a length that divides T; got 5",
    ),
    (
        lambda: router(SequenceLoss(1.0))(numbers(T, H), sequences=torch.zeros(T)),
        "Router: sequences must be whole numbers [T], T=12, or a length that divides T; got float32 [12]",
    ),
    (
        lambda: MoE(H, 8, E, K)(torch.zeros(2, T, H), sequences=torch.zeros(T, dtype=torch.int64)),
        "MoE: sequences must be [...], as the tokens [..., 6]: [2, 12]; got [12]",
    ),
    (
        lambda: MoE(H, 8, E, K)(torch.zeros(T, H), ids=torch.zeros(T, K), routes=router()(numbers(T, H))),
        "MoE: routes are already made, so ids cannot be given with them",
    ),
    (
        lambda: MoE(H, 8, E, K)(torch.zeros(3, 4, H), routes=router()(numbers(11, H))),
        "MoE: routes must be of the tokens, flattened, and of a router with as many experts: T=12, E=8; got T=11, E=8",
    ),
    (  # whose ids the experts would leave out, and whose counts no load fits
        lambda: MoE(H, 8, E, K)(torch.zeros(T, H), routes=Router(H, E + 1, K)(torch.zeros(T, H))),
        "T=12, E=8; got T=12, E=9",
    ),
    (  # whose counts would be added to all loads
        lambda: MoE(H, 8, E, 1, bias_update_rate=1.0)(torch.zeros(T, H), routes=Router(H, 1, 1)(torch.zeros(T, H))),
        "T=12, E=8; got T=12, E=1",
    ),
    (
        lambda: MoE(H, 8, E, K)(torch.zeros(T, H), routes=torch.zeros(T, K)),
        "MoE: routes must be those that a Router returns, got a Tensor",
    ),
    (
        lambda: MoE(H, 8, E, K, scores="sigmoid", balance=QuantileBias())(
            torch.zeros(T, H), routes=router()(numbers(T, H))
        ),
        "QuantileBias needs scores='sigmoid' without groups, as scores lie between 0 and 1; got scores='softmax'",
    ),
    (
        lambda: MoE(H, 8, E, K, scores="sigmoid", balance=QuantileBias())(
            torch.zeros(T, H), routes=Router(H, E, E, scores="sigmoid")(torch.zeros(T, H))
        ),
        "QuantileBias needs experts that are not chosen; got top_k=num_experts=8",
    ),
    (
        lambda: router(SequenceLoss(1.0))(numbers(T, H), sequences=torch.zeros(T, dtype=torch.int64, device="meta")),
        "Router: sequences must be on cpu, as the logits, got meta",
    ),
    (lambda: router(bias=torch.zeros(E)), "Router: bias must be True or False, got tensor"),
    (lambda: router(selection_bias=torch.zeros(E)), "Router: selection_bias must be True or False, got tensor"),
    (lambda: router(normalize=1), "Router: normalize must be True or False, got 1"),
    (lambda: SignBias(1e-3, centre="no"), "SignBias: centre must be True or False, got 'no'"),
    (
        lambda: MoE(H, 8, E, K, bias_update_rate=1e-3, balance=QuantileBias()),
        "MoE: bias_update_rate=u is balance=SignBias(u); give one of them",
    ),
    (
        lambda: router(balance=QuantileBias()),
        "Router: QuantileBias needs scores='sigmoid' without groups, as scores lie between 0 and 1; got "
        "scores='softmax', groups=1",
    ),
    (
        lambda: router(balance=QuantileBias(), scores="sigmoid", groups=Groups(4, 2)),
        "got scores='sigmoid', groups=4",
    ),
    (
        lambda: Router(H, K, K, balance=QuantileBias(), scores="sigmoid"),
        "Router: QuantileBias needs experts that are not chosen; got top_k=num_experts=3",
    ),
    (lambda: SwitchLoss("1"), "SwitchLoss: alpha must be a finite number, got '1'"),
    (lambda: QuantileBias(0), "QuantileBias: bins must be at least 1, got 0"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_calls_that_cannot_be(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ArgumentError, ValueError), match=re.escape(words)):
        call()


def test_ids_of_no_expert_are_found_on_demand() -> None:
    ids = torch.zeros(T, K, dtype=torch.int64)
    ids[4, 1] = E
    router()(numbers(T, H), ids=ids)
    with config(debug=True), pytest.raises(ArgumentError, match=r"ids must be from -1 to 7, got \[0, 8, 0\] in row 4"):
        router()(numbers(T, H), ids=ids)


def test_there_is_no_bias_to_update() -> None:
    with pytest.raises(RuntimeError, match="Router: there is no bias to update; build it with balance"):
        router(selection_bias=True).update_bias()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_with_losses_and_balance() -> None:
    def layer() -> MoE:
        torch.manual_seed(0)
        balance = QuantileBias(20)
        return MoE(H, 8, E, K, losses=ALL, balance=balance, scores="sigmoid", router_bias=True, dtype=D)

    given: dict[str, Any] = {"valid": torch.arange(T) % 5 != 0, "sequences": 4}
    eager, compiled, x = layer(), layer(), numbers(T, H)
    for model, call in ((eager, eager), (compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True))):
        output = call(x, **given)
        (output.y.square().sum() + output.balance_loss).backward()
        model.update_bias()

    for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(eager.router.selection_bias, compiled.router.selection_bias)


def _world(rank: int, world: int, file: str) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


BOUNDS = {2: [0, 4, T], 4: [0, 1, 6, 6, T]}
"""The tokens of ranks: different numbers, of the third of four none."""


def _own(rank: int, world: int, x: Tensor) -> Tensor:
    return x[BOUNDS[world][rank] : BOUNDS[world][rank + 1]]


def _global_loss(rank: int, world: int) -> None:
    """The mean over ranks, also of the gradients, is that of all tokens together."""
    x = numbers(T, H)
    own, whole = router(GlobalLoss(0.5)), router(SwitchLoss(0.5))
    loss, expected = own(_own(rank, world, x)).loss, whole(x).loss
    loss.backward()
    expected.backward()
    for ours in (mean := loss.detach().clone(), own.weight.grad):
        dist.all_reduce(ours)
    torch.testing.assert_close(mean / world, expected.detach())
    torch.testing.assert_close(own.weight.grad / world, whole.weight.grad)


def _balanced(balances: list[Any]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(MoE(H, 8, E, K, scores="sigmoid", balance=balance, dtype=D) for balance in balances)


def _global_loads(rank: int, world: int) -> None:
    """Biases are those of one process that has had all tokens of all ranks and microbatches, to the bit.

    They are updated with one reduction for all layers or each alone, and under FSDP2.
    """
    balances, batches = [SignBias(1e-3), QuantileBias(20)], [numbers(T, H, seed=i) for i in (1, 2)]
    models = [_balanced(balances) for _ in range(4)]
    together, _, sharded, whole = models
    for layer in sharded:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (world,)))
    for model in models:
        for x in batches:
            tokens = x if model is whole else _own(rank, world, x)
            for layer in model:
                layer(tokens, valid=tokens[:, 0] > -1).y.sum().backward()
    update_biases(together, group=dist.group.WORLD)
    update_biases(sharded, group=dist.group.WORLD)
    update_biases(whole)
    for *layers, alone in zip(*models, strict=True):
        layers[1].update_bias(dist.group.WORLD)
        assert alone.router.selection_bias.any()
        for layer in layers:
            assert torch.equal(layer.router.selection_bias, alone.router.selection_bias)
            assert not layer.load.any()


def test_a_process_alone_is_all_ranks() -> None:
    """``torch.distributed`` is not initialised."""
    x = numbers(T, H)

    assert torch.equal(router(GlobalLoss(0.5))(x).loss, router(SwitchLoss(0.5))(x).loss)


def _sharded_gate(rank: int, world: int) -> None:
    """A policy of 16 bits leaves the gate in float32 where it is sharded by itself, as docs/fsdp.md says."""
    torch.manual_seed(0)
    layer, x = MoE(H, 8, E, K), torch.randn(T, H)
    expected = layer.router(x.bfloat16()).probabilities
    gate = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    mesh = dist.init_device_mesh("cpu", (world,))
    fully_shard(layer.router, mesh=mesh, mp_policy=gate)
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found = []
    layer.router.register_forward_hook(lambda router, arguments, routes: found.append(routes.probabilities))
    layer(x)
    assert torch.equal(found[0], expected)


def _on_ranks(rank: int, world: int, file: str) -> None:
    for _ in _world(rank, world, file):
        _global_loss(rank, world)
        _global_loads(rank, world)
        _sharded_gate(rank, world)


@pytest.mark.parametrize("world", BOUNDS)
def test_on_ranks(tmp_path: Path, world: int) -> None:
    mp.spawn(_on_ranks, (world, os.fspath(tmp_path / "store")), world)
