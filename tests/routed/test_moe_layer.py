"""``fusible.MoE``: the whole layer against a loop over experts in float64; routing, balancing, copies, compilation."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from checks.layers import check_layer_trains
from models import steps
from reference import assert_same, glu
from torch import Tensor, nn
from torch.nn import functional as F

from fusible import ArgumentError, MoE, Router, interleaved
from fusible.ops.layers.balance import balancing_step

pytestmark = pytest.mark.usefixtures("fresh_compiler")
HIDDEN, FFN, E, K = 6, 4, 8, 3
SHAPE = (2, 5, HIDDEN)
D = torch.float64
DEEPSEEK: dict[str, Any] = {"scores": "sigmoid", "scale": 2.5, "groups": 4, "top_groups": 2, "bias_update_rate": 0.1}
LAYERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not normalised": {"normalize": False},
    "sigmoid": {"scores": "sigmoid", "scale": 2.5},
    "biases": {"bias": True},
    "interleaved": {"layout": interleaved(2)},
    "relu2": {"activation": "relu2"},
    "balance loss": {"balance_loss": 0.5},
    "balance loss of sigmoids": {"scores": "sigmoid", "balance_loss": 0.5},
    "shared": {"shared_ffn": 10},
    "shared, gated, biases": {"shared_ffn": 10, "shared_gate": True, "bias": True},
    "DeepSeek-V3": {**DEEPSEEK, "shared_ffn": 4, "balance_loss": 0.5},
}


def layer(dtype: torch.dtype = D, **how: Any) -> MoE:
    torch.manual_seed(0)
    moe = MoE(HIDDEN, FFN, E, K, dtype=dtype, **how)
    if moe.router.selection_bias is not None:
        moe.router.selection_bias.copy_(torch.randn(E) * 0.2)
    return moe


def tokens(*shape: int, dtype: torch.dtype = D) -> Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randn(shape or SHAPE, generator=g, dtype=D).to(dtype).requires_grad_()


def by_hand(moe: MoE, x: Tensor, how: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Token by token, in plain torch."""
    state, act = dict(moe.named_parameters()), _act(how)
    rows = x.reshape(-1, HIDDEN)
    logits = rows @ state["router.weight"].T
    scores = logits.softmax(-1) if how.get("scores") != "sigmoid" else logits.sigmoid()
    y, chosen = [], []
    for t, row in enumerate(rows):
        ids = _chosen(moe, scores[t].detach(), how)
        weights = scores[t, ids]
        weights = weights / weights.sum() if how.get("normalize", True) else weights
        parts = [w * how.get("scale", 1) * _expert(state, e, row, act) for e, w in zip(ids, weights, strict=True)]
        shared = _shared(state, row, act) if "shared_ffn" in how else 0
        y.append(sum(parts) + shared)
        chosen += ids
    return torch.stack(y).view(x.shape), _loss(scores, chosen, how)


def _act(how: dict[str, Any]) -> Any:
    if "activation" in how:
        return lambda x: torch.relu(x) ** 2
    return glu("silu", block=2 if "layout" in how else None)


def _chosen(moe: MoE, scores: Tensor, how: dict[str, Any]) -> list[int]:
    best = scores if moe.router.selection_bias is None else scores + moe.router.selection_bias
    allowed = range(E)
    if "groups" in how:
        each = E // how["groups"]
        of_groups = [sum(sorted(best[g * each : (g + 1) * each].tolist())[-2:]) for g in range(how["groups"])]
        good = sorted(range(how["groups"]), key=lambda g: -of_groups[g])[: how["top_groups"]]
        allowed = [e for e in range(E) if e // each in good]
    return sorted(allowed, key=lambda e: -best[e].item())[:K]


def _expert(state: dict[str, Tensor], e: int, row: Tensor, act: Any) -> Tensor:
    up, down = (state[f"experts.{name}.weight"][e] for name in ("up", "down"))
    biases = [state[f"experts.{n}.bias"][e] if f"experts.{n}.bias" in state else 0 for n in ("up", "down")]
    return down @ act((up @ row + biases[0])[None])[0] + biases[1]


def _shared(state: dict[str, Tensor], row: Tensor, act: Any) -> Tensor:
    pre = F.linear(row, state["shared.mlp.up.weight"], state.get("shared.mlp.up.bias"))
    y = F.linear(act(pre[None])[0], state["shared.mlp.down.weight"], state.get("shared.mlp.down.bias"))
    return y * torch.sigmoid(state["shared.gate"][0] @ row) if "shared.gate" in state else y


def _loss(scores: Tensor, chosen: list[int], how: dict[str, Any]) -> Tensor | None:
    if "balance_loss" not in how:
        return None
    probabilities = scores / scores.sum(-1, keepdim=True)
    f = [chosen.count(e) / len(chosen) for e in range(E)]
    return how["balance_loss"] * E * sum(f[e] * probabilities[:, e].mean() for e in range(E))


def results(moe: nn.Module, x: Tensor, output: tuple[Any, ...]) -> dict[str, Tensor | None]:
    """The output, the loss, and all gradients by name."""
    y, loss = output[:2]
    leaves = {n: t for n, t in {"x": x, **dict(moe.named_parameters())}.items() if t.requires_grad}
    total = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    total = total if loss is None else total + loss.to(total.dtype)
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {"y": y.detach(), "loss": None if loss is None else loss.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_close(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    assert ours.keys() == truth.keys()
    for name, right in truth.items():
        assert (ours[name] is None) == (right is None), name
        if right is not None:
            torch.testing.assert_close(ours[name], right, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", LAYERS)
def test_gives_what_a_loop_over_tokens_gives(name: str) -> None:
    how, x = LAYERS[name], tokens()
    moe = layer(**how)

    assert_close(results(moe, x, moe(x)), results(moe, x, by_hand(moe, x, how)))
    assert steps(moe.experts) == ["RoutedMLP"]


def test_explain_shows_the_fused_layer() -> None:
    moe = layer()
    moe(tokens())
    explanation = moe.experts.explain()

    assert [step.name for step in explanation.steps] == ["RoutedMLP"]


@pytest.mark.parametrize("name", ["router", "experts", "shared", "x"])
def test_frozen_parts_change_no_other_gradient(name: str) -> None:
    how, x = LAYERS["shared, gated, biases"], tokens()
    moe = layer(**how)
    frozen = [x] if name == "x" else list(getattr(moe, name).parameters())
    for tensor in frozen:
        tensor.requires_grad_(False)
    ours = results(moe, x, moe(x))

    assert len(ours) == 2 + 1 + len(list(moe.parameters())) - len(frozen)
    assert_close(ours, results(moe, x, by_hand(moe, x, how)))


@pytest.mark.parametrize("name", ["softmax", "DeepSeek-V3", "balance loss"])
def test_no_tokens(name: str) -> None:
    moe, x = layer(**LAYERS[name]), torch.zeros(0, 5, HIDDEN, dtype=D, requires_grad=True)
    found = results(moe, x, output := moe(x))

    assert output.y.shape == (0, 5, HIDDEN)
    assert output.tokens_per_expert.tolist() == [0] * E
    assert output.balance_loss is None or output.balance_loss == 0
    assert all(t is None or torch.equal(t, torch.zeros_like(t)) for t in found.values())


def test_counts_are_those_of_the_choices() -> None:
    moe, x = layer(), tokens()
    routes = moe.router(x.reshape(-1, HIDDEN))

    assert moe(x).tokens_per_expert.tolist() == [int((routes.top_k_index == e).sum()) for e in range(E)]


def test_weights_add_up_to_the_scale() -> None:
    routes = layer(**LAYERS["sigmoid"]).router(tokens(20, HIDDEN))

    torch.testing.assert_close(routes.top_k_weights.sum(-1), torch.full((20,), 2.5, dtype=D))
    torch.testing.assert_close(routes.probabilities.sum(-1), torch.ones(20, dtype=D))


@pytest.mark.parametrize("name", ["shared, gated, biases", "DeepSeek-V3"])
def test_compiled_as_one_graph(name: str) -> None:
    moe, other, x = layer(**LAYERS[name]), layer(**LAYERS[name]), tokens()
    eager, compiled = moe(x), torch.compile(other, backend="aot_eager", fullgraph=True)(x)

    assert_close(results(other, x, compiled), results(moe, x, eager))
    assert name != "DeepSeek-V3" or torch.equal(other.load, moe.load)
    assert_same(compiled.tokens_per_expert, eager.tokens_per_expert)
    assert name != "DeepSeek-V3" or torch.equal(moe.load, eager.tokens_per_expert)


def test_state_dict_round_trip() -> None:
    moe, x = layer(**LAYERS["DeepSeek-V3"]), tokens()
    moe(x)
    other = MoE(HIDDEN, FFN, E, K, dtype=D, **LAYERS["DeepSeek-V3"])
    other.load_state_dict(moe.state_dict())

    assert "router.selection_bias" in moe.state_dict()
    assert "load" not in moe.state_dict()
    assert_same(other(x).y.detach(), moe(x).y.detach())


def test_copies_and_files() -> None:
    moe, x = layer(**LAYERS["DeepSeek-V3"]), tokens()
    expected, file = results(moe, x, moe(x)), io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    for other in (copy.deepcopy(moe), torch.load(file, weights_only=False)):
        assert_close(results(other, x, other(x)), expected)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in moe.parameters()}


def test_built_without_data_and_filled_later() -> None:
    how = LAYERS["DeepSeek-V3"] | {"shared_gate": True, "bias": True}
    with torch.device("meta"):
        moe = MoE(HIDDEN, FFN, E, K, dtype=D, **how)
    assert all(t.is_meta for t in (*moe.parameters(), *moe.buffers(), moe.load))
    assert moe(torch.empty(SHAPE, dtype=D, device="meta")).y.shape == SHAPE

    moe.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*moe.parameters(), *moe.buffers(), moe.load):
            tensor.fill_(77)
    moe.reset_parameters()

    assert moe.load.tolist() == moe.router.selection_bias.tolist() == [0] * E
    assert all(0 < p.abs().max() <= 1 / FFN**0.5 for p in moe.parameters())
    x = tokens()
    assert_close(results(moe, x, moe(x)), results(moe, x, by_hand(moe, x, how)))


@pytest.mark.parametrize("name", ["shared, gated, biases", "DeepSeek-V3"])
def test_bf16_is_near(name: str) -> None:
    moe = layer(**LAYERS[name])
    half = copy.deepcopy(moe).to(torch.bfloat16)
    moe.load_state_dict(half.state_dict())
    x = tokens(dtype=torch.bfloat16)
    ours, truth = half(x), moe(x.to(D))

    assert ours.y.dtype == torch.bfloat16
    assert torch.equal(ours.tokens_per_expert, truth.tokens_per_expert)
    assert (ours.y.double() - truth.y).norm() <= 0.02 * truth.y.norm()


def test_a_layer_in_bf16_trains_as_one_in_float64() -> None:
    check_layer_trains("cpu")


def test_the_bias_and_the_router_keep_their_bits() -> None:
    """The choice of experts is computed in float32, whatever the dtype of the experts."""
    moe = layer(torch.bfloat16, **LAYERS["DeepSeek-V3"])
    routes = moe.router(tokens(4, HIDDEN, dtype=torch.bfloat16))

    assert moe.router.selection_bias.dtype == torch.float32
    assert routes.top_k_weights.dtype == torch.float32


@pytest.mark.parametrize("cast", [lambda moe: moe.to(torch.bfloat16), lambda moe: moe.half(), lambda moe: moe.double()])
def test_casts_leave_the_bias_as_it_is(cast: Any) -> None:
    moe = layer(torch.float32, **LAYERS["DeepSeek-V3"])
    bias = moe.router.selection_bias.clone()
    cast(moe)

    assert_same(moe.router.selection_bias, bias)
    assert moe.router.weight.dtype != torch.float32


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_a_file_of_16_bits_leaves_the_bias_in_float32(built_on: str, assign: bool) -> None:
    how = {"dtype": torch.bfloat16, "bias_update_rate": 1e-3}
    state = {name: value.bfloat16() for name, value in MoE(HIDDEN, FFN, E, K, **how).state_dict().items()}
    moe = MoE(HIDDEN, FFN, E, K, device=built_on, **how)
    if built_on == "meta" and not assign:
        moe.to_empty(device="cpu")
    moe.load_state_dict(state, assign=assign)
    bias = moe.router.selection_bias.fill_(6.8)
    moe(tokens(64, HIDDEN, dtype=torch.bfloat16)).y.sum().backward()
    moe.update_bias()

    assert bias.dtype == torch.float32
    assert moe.router.selection_bias is bias
    assert (bias - 6.8).abs().max() == pytest.approx(1e-3, rel=1e-2)
    assert state["router.selection_bias"].dtype == torch.bfloat16


ROWS: dict[str, tuple[dict[str, Any], list[float], list[int]]] = {
    "equal": ({}, [0.5] * 8, [0, 1, 2]),
    "two of three equal": ({}, [0, 1, 2, 1, 0, 1, 0, 0], [2, 1, 3]),
    "saturated sigmoids": ({"scores": "sigmoid"}, [30, 31, 32, 33, 34, 35, 36, 37], [7, 6, 5]),
    "sigmoids that are zero": ({"scores": "sigmoid"}, [-200, -150, -200, -140, -210, -220, -130, -190], [6, 3, 1]),
    "softmax that is zero": ({}, [0, -300, -200, -150, -400, -500, -600, -700], [0, 3, 2]),
    "a bias": ({"scores": "sigmoid", "selection_bias": True}, [40, 41, 42, 43, 44, 45, 46, 47], [0, 1, 2]),
    "groups": ({"groups": 4, "top_groups": 2}, [0.5] * 8, [0, 1, 2]),
    "-inf": ({}, [-torch.inf] * 6 + [1, -torch.inf], [6, 0, 1]),
    "nan": ({}, [9, 8, 7, torch.nan, 5, torch.nan, 3, 2], [3, 5, 0]),
}


@pytest.mark.parametrize("name", ROWS)
def test_equal_scores_go_to_the_lower_expert(name: str) -> None:
    how, logits, expected = ROWS[name]
    router = Router(1, E, K, **how)
    with torch.no_grad():
        router.weight.copy_(torch.tensor(logits)[:, None])
    index = router(torch.ones(5, 1)).top_k_index

    assert index.tolist() == [expected] * 5
    assert index.is_contiguous()


def test_autocast_routes_as_without() -> None:
    moe, x = layer(torch.float32, shared_ffn=10, shared_gate=True), tokens(dtype=torch.float32)
    plain = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        ours = moe(x)
        routes = moe.router(x.reshape(-1, HIDDEN))

    assert ours.y.dtype == torch.bfloat16
    assert torch.equal(ours.tokens_per_expert, plain.tokens_per_expert)
    assert_same(routes.top_k_weights.detach(), moe.router(x.reshape(-1, HIDDEN)).top_k_weights.detach())
    assert (ours.y.float() - plain.y).norm() <= 0.03 * plain.y.norm()
    found = results(moe, x, ours)
    assert all(t.dtype == torch.float32 for n, t in found.items() if n not in ("y", "loss"))


def test_balance_loss_trains_towards_an_even_load() -> None:
    moe, x = layer(balance_loss=1.0), tokens(256, HIDDEN).detach() + 1
    optimizer = torch.optim.SGD(moe.router.parameters(), lr=0.3)
    spread = []
    for _ in range(60):
        output = moe(x)
        spread.append(_spread(output.tokens_per_expert))
        optimizer.zero_grad()
        output.balance_loss.backward()
        optimizer.step()

    assert spread[-1] < spread[0] / 2


def test_the_bias_moves_loads_to_balance() -> None:
    """Loss-free balancing, arxiv 2408.15664: nothing is trained, the bias alone moves."""
    moe, x = layer(scores="sigmoid", bias_update_rate=0.01), tokens(512, HIDDEN).detach() + 1
    moe.router.selection_bias.zero_()
    before = moe(x)
    for _ in range(200):
        after = moe(x)
        after.y.sum().backward()
        moe.update_bias()

    assert _spread(before.tokens_per_expert) > 0.5
    assert _spread(after.tokens_per_expert) < 0.15
    assert moe.router.selection_bias.grad is None
    assert not moe.router.selection_bias.requires_grad


def _spread(counts: Tensor) -> float:
    """How far the busiest expert is above the mean, as a share of it (MaxVio in arxiv 2408.15664)."""
    return float(counts.max() / counts.double().mean() - 1)


def test_a_step_of_the_bias_is_its_rate_with_the_sign_of_what_is_missing() -> None:
    assert balancing_step(torch.tensor([0, 4, 2, 2]), 0.5).tolist() == [0.5, -0.5, 0, 0]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    moe = layer(scores="sigmoid", bias_update_rate=0.1, normalize=False)
    moe.router.selection_bias.zero_()[5] = 100
    routes = moe.router(tokens(4, HIDDEN))

    assert (routes.top_k_index == 5).any(-1).all()
    assert routes.top_k_weights.max() <= 1


def test_updates_see_all_calls_of_training_since_the_last() -> None:
    moe, x = layer(bias_update_rate=0.1), tokens()
    counts = moe(x).tokens_per_expert
    moe(x)
    moe.eval()
    moe(x)
    before = moe.router.selection_bias.clone()
    assert torch.equal(moe.load, 2 * counts)
    moe.update_bias()

    assert torch.equal(moe.load, torch.zeros_like(counts))
    torch.testing.assert_close(moe.router.selection_bias - before, balancing_step(2 * counts, 0.1))


def test_updates_count_the_tokens_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    moe, others = layer(bias_update_rate=0.1), torch.arange(E) * 100
    moe(tokens()).y.sum().backward()
    expected = moe.router.selection_bias + balancing_step(moe.load + others, 0.1)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda load, group: load.add_(others))
    moe.update_bias(group="all ranks")

    torch.testing.assert_close(moe.router.selection_bias, expected)


def test_without_a_bias_there_is_none_to_update() -> None:
    with pytest.raises(RuntimeError, match="MoE: there is no selection bias; build the layer with bias_update_rate"):
        layer().update_bias()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"top_k": 9}, "Router: top_k must be at most num_experts=8, got 9"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"ffn": 4.0}, "MoE: ffn must be an int, got 4.0"),
        ({"shared_ffn": 0}, "MoE: shared_ffn must be at least 1, got 0"),
        ({"balance_loss": True}, "MoE: balance_loss must be a finite number, got True"),
        ({"bias_update_rate": "1e-3"}, "MoE: bias_update_rate must be a finite number, got '1e-3'"),
        ({"scale": None}, "Router: scale must be a finite number, got None"),
        ({"scores": "relu"}, "Router: scores must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'"),
        ({"groups": 3}, "groups must divide num_experts=8"),
        ({"groups": 4, "top_groups": 5}, "top_groups be at most groups; got groups=4, top_groups=5"),
        ({"groups": 4}, "1 of 4 groups hold 2 experts, which are fewer than top_k=3"),
        ({"shared_gate": True}, "MoE: shared_gate is the gate of shared experts; give shared_ffn"),
        ({"activation": "swish"}, "activation must be one of"),
    ],
)
def test_layers_that_cannot_be(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        MoE(**{"hidden": HIDDEN, "ffn": FFN, "experts": E, "top_k": K, **how})


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(3, HIDDEN + 1), "[..., 6], got shape [3, 7]"),
        ([1.0], "got a list"),
        (torch.tensor(1.0), "shape []"),
    ],
)
def test_tokens_that_do_not_fit(x: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        layer()(x)


def test_a_router_says_what_it_is() -> None:
    assert "6, 3 of 8, sigmoid, 2 of 4 groups" in repr(Router(6, 8, 3, scores="sigmoid", groups=4, top_groups=2))


@pytest.mark.parametrize("bias", [False, True])
def test_one_parameter_an_expert_for_an_optimiser_of_matrices(bias: bool) -> None:
    stacked, moe = layer(torch.float32, bias=bias), layer(torch.float32, bias=bias, single_grouped_weight=False)
    moe.load_state_dict(stacked.state_dict())
    for each in (stacked, moe):
        each(tokens(dtype=torch.float32)).y.square().mean().backward()
    with pytest.raises(ValueError, match="only supports 2D"):
        torch.optim.Muon(stacked.experts.parameters())
    before = {name: p.detach().clone() for name, p in moe.named_parameters()}
    matrices = [p for p in moe.experts.parameters() if p.dim() == 2]
    torch.optim.Muon(matrices, lr=0.1).step()

    assert [list(p.shape) for p in matrices] == [[2 * FFN, HIDDEN]] * E + [[HIDDEN, FFN]] * E
    for name in ("up", "down"):
        for expert in range(E):
            alone = nn.Parameter(before[f"experts.{name}.weight{expert}"].clone())
            alone.grad = stacked.experts.get_submodule(name).weight.grad[expert]
            torch.optim.Muon([alone], lr=0.1).step()
            torch.testing.assert_close(moe.get_parameter(f"experts.{name}.weight{expert}"), alone)
