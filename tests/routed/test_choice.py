"""The choice of experts on the CPU (tests/emulation): the checks of a GPU, on small problems."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from checks import choice
from checks.choice import Case
from checks.many_groups import GROUPS, SLOTS
from emulation import build, harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusible import RefusedError, Router, SignBias, SwitchLoss, ZLoss, config
from fusible.fuser import replay
from fusible.ops.kernels.hopper import choice as kernel
from fusible.ops.kernels.problems.choice import SCORES, ChoiceRule, Choosing
from fusible.ops.kernels.pytorch.choice import log_scores

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]

SIZES = [
    {"experts": 8, "top_k": 2},
    {"experts": 60, "top_k": 4, "biased": True},
    {"experts": 128, "top_k": 8, "pads": True},
    {"experts": 256, "top_k": 8, "groups": (8, 4, 2), "biased": True, "pads": True},
    {"experts": 256, "top_k": 6, "groups": (8, 3, 1)},
    {"experts": 513, "top_k": 10, "biased": True},
    {"experts": 1024, "top_k": 32, "tokens": 9},
    {"experts": 1025, "top_k": 3, "biased": True, "tokens": 7, "pads": True},
    {"experts": 4096, "top_k": 32, "groups": (32, 16, 2), "tokens": 4},
]


@pytest.fixture(autouse=True)
def _no_other_kernels() -> Iterator[None]:
    """PyTorch's operations would be right as well."""
    with config(backend="hopper"):
        yield


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['experts']}-{sizes['top_k']}")
def test_choices_and_gradients(scores: str, sizes: dict[str, Any]) -> None:
    for normalize in (True, False):
        choice.check("cpu", Case(scores=scores, normalize=normalize, **sizes))


@pytest.mark.parametrize("top_k", SLOTS)
@pytest.mark.parametrize("experts", GROUPS)
def test_many_experts(experts: int, top_k: int) -> None:
    """On both sides of a kernel's form; with and without the bias, in each of the scores."""
    for i, scores in enumerate(SCORES):
        choice.check("cpu", Case(experts, top_k, 5, scores, normalize=top_k % 4 > 0, biased=i < 2, pads=i > 0))


def _before_a_guard(x: Tensor) -> Tensor:
    """A copy whose end is that of its last page, behind which nothing may be read: a read ends the process."""
    page, size = mmap.PAGESIZE, -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(page), 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes).copy_(x)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("experts", [5, 511, 512])
def test_gradients_read_nothing_behind_the_last_expert(experts: int, scores: str) -> None:
    p = choice.problem("cpu", Case(experts, 2, 5, scores))
    out, d_sums = choice.chosen(p), torch.randn(experts)
    d = torch.ones_like(out.weights), d_sums, torch.ones(1)
    guarded = choice.gradient(p, out.ids, d[0], _before_a_guard(d_sums), d[2])
    assert torch.equal(guarded, choice.gradient(p, out.ids, *d))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.sampled_from([1, 1, 2, 8, 32]))
    size = draw(st.integers(1, 40))
    keep, best = draw(st.integers(1, count)), draw(st.integers(1, 2))
    top_k = draw(st.integers(1, min(32, size * keep)))
    flags = draw(
        st.fixed_dictionaries(dict.fromkeys(("normalize", "biased", "pads", "given", "tallied"), st.booleans()))
    )
    groups = (count, keep, best) if count > 1 else (1, 1, 1)
    sizes = {
        "tokens": draw(st.integers(4 if flags["given"] else 0, 12)),
        "scores": draw(st.sampled_from(SCORES)),
        "groups": groups,
    }
    return Case(count * size, top_k, **sizes, **flags)


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_rule(case: Case) -> None:
    choice.check("cpu", case)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_given_experts(scores: str, normalize: bool) -> None:
    for pads, tallied in itertools.product((True, False), repeat=2):
        choice.check("cpu", Case(60, 5, scores=scores, normalize=normalize, given=True, pads=pads, tallied=tallied))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [96, 61])
def test_logits_of_16_bits(dtype: torch.dtype, experts: int) -> None:
    for scores in SCORES:
        choice.check("cpu", Case(experts, 6, scores=scores, dtype=dtype, pads=True))


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 300])
def test_tokens(tokens: int) -> None:
    choice.check("cpu", Case(12, 3, tokens=tokens))
    choice.check("cpu", Case(12, 3, tokens=tokens, tallied=False))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("by_scores", [True, False])
def test_odd_numbers(scores: str, by_scores: bool) -> None:
    choice.check_odd("cpu", scores, 60, by_scores)


@pytest.mark.parametrize("biased", [True, False])
def test_large_logits(biased: bool) -> None:
    choice.check_large("cpu", biased)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_numbers_beside_odd_ones(scores: str, normalize: bool) -> None:
    choice.check_beside_odd("cpu", scores, normalize)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("experts", [60, 1100])
def test_near_ties(scores: str, experts: int) -> None:
    choice.check_near_ties("cpu", scores, experts)


@pytest.mark.parametrize("scores", SCORES)
def test_float32_is_as_near_to_float64_as_the_bounds_say(scores: str) -> None:
    """The bounds hold for PyTorch's float32 scores, and for the keys, which the kernel computes alike."""
    p = Choosing(4 * choice.numbers("cpu", 50, 512), ChoiceRule(8, scores, True, 1.0), torch.zeros(512), None, None)
    keys, bounds = choice.keys_and_bounds(p)
    logs = log_scores(p.logits, scores)
    logs = logs - p.logits.logsumexp(-1, keepdim=True) if scores == "softmax" else logs

    assert ((logs.exp() - keys).abs() <= bounds).all()
    assert ((logs.exp() - keys).abs() > bounds / 200).any()


@pytest.mark.parametrize("sizes", [(256, 8), (1100, 4)])
def test_tokens_do_not_see_one_another(emulation: harness.Emulation, sizes: tuple[int, int]) -> None:
    case = Case(*sizes, scores="sigmoid", biased=True)
    choice.check_alone("cpu", case)
    in_order = choice.chosen(choice.problem("cpu", case))
    with emulation.shuffled(1):
        for first, second in zip(in_order, choice.chosen(choice.problem("cpu", case)), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("logits", "rule", "why"),
    [
        (
            torch.zeros(2, 5000),
            ChoiceRule(1, "softmax", True, 1.0),
            "takes at most 4096 experts, 32 choices and 2^25 tokens",
        ),
        (torch.zeros(2, 64), ChoiceRule(33, "softmax", True, 1.0), "got 64, 33 and 2"),
        (torch.zeros(2, 8).double(), ChoiceRule(1, "softmax", True, 1.0), "needs logits of 16 or 32 bits"),
        (
            torch.zeros(2, 80),
            ChoiceRule(1, "sigmoid", True, 1.0, 40, 2),
            "takes at most 32 groups by their best 1 or 2",
        ),
        (torch.zeros(2, 80), ChoiceRule(1, "sigmoid", True, 1.0, 4, 2, 3), "got 4 by 3"),
    ],
)
def test_refusals(logits: Tensor, rule: ChoiceRule, why: str) -> None:
    refused = kernel.refusal(Choosing(logits, rule, None, None, None))

    assert refused is not None
    assert why in refused


H, E, K, T = 16, 12, 3, 10


def router() -> Router:
    torch.manual_seed(0)
    losses = (SwitchLoss(0.5), ZLoss(0.125))
    return Router(H, E, K, scores="sigmoid", losses=losses, balance=SignBias(1e-3), scale=1.5)


def step(part: Router, x: Tensor, **given: Any) -> list[Tensor]:
    """The results of a call, and the gradients."""
    part.zero_grad()
    routes = part(x, **given)
    (routes.top_k_weights.square().sum() + routes.loss).backward()
    return [*routes[:3], routes.loss.detach(), part.weight.grad]


def arguments(names: tuple[str, ...], tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """These arguments of a call."""
    ids = (torch.arange(tokens * K).view(tokens, K) + seed) % E
    ids[::4] = -1  # missing rows
    return {name: {"valid": (torch.arange(tokens) + seed) % 3 > 0, "ids": ids}[name] for name in names}


GIVEN = pytest.mark.parametrize("names", [(), ("valid",), ("ids",), ("valid", "ids")], ids="-".join)


@GIVEN
def test_a_router_runs_the_kernel(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    part, x, made = router(), torch.randn(T, H), []
    for name in ("forward", "backward"):
        run = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *a, name=name, run=run: (made.append(name), run(*a)))
    ours = step(part, x, **arguments(names, T))
    with config(backend="loop"):
        theirs = step(part, x, **arguments(names, T))

    assert made == ["forward", "backward"]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_explain_shows_the_kernel() -> None:
    part = router()
    part(torch.randn(T, H))

    assert "fusible (choose)" in str(part.choice.explain())
    with config(backend="loop"):
        part(torch.randn(T, H))
        assert "config(backend='loop')" in str(part.choice.explain())


def test_a_choice_that_the_kernel_does_not_take_is_refused_when_strict() -> None:
    with config(strict=True), pytest.raises(RefusedError, match="the choice of experts has no kernel of hopper"):
        Router(H, E, K, dtype=torch.float64)(torch.randn(T, H).double())


@pytest.fixture
def replayed() -> Iterator[None]:
    with replay.simulated("cpu"):
        yield


@pytest.mark.usefixtures("replayed")
@GIVEN
def test_replays_give_the_bits_of_the_first_call(names: tuple[str, ...]) -> None:
    part, before = router(), replay.stats().replayed
    for call, tokens in enumerate((T, T, T, T + 3, T + 3, T + 5, 4)):
        x = torch.randn(tokens, H)
        ours, theirs = (step(each, x, **arguments(names, tokens, call)) for each in (part, router()))
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))

    assert replay.stats().replayed > before + 4


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("how", [{"scores": "sigmoid", "bias_update_rate": 0.1}, {"losses": (ZLoss(0.1),)}], ids=str)
@pytest.mark.parametrize("shared", [None, 32])
def test_replays_of_a_layer_give_the_bits_of_the_first_call(
    emulation: harness.Emulation, how: dict[str, Any], shared: int | None
) -> None:
    """The backward runs in a thread of its own, as on a GPU; the last calls in other orders of threads."""
    before = replay.stats().replayed
    with ThreadPoolExecutor(1) as engine:
        layer = choice.check_calls_of_a_layer("cpu", how, shared, engine)
        for seed in (1, 2):
            with emulation.shuffled(seed):
                choice.check_calls_of_a_layer("cpu", how, shared, engine, layer)

    assert replay.stats().replayed == before + 5 * 4  # both containers, forward and backward
    assert "replayed" in str(layer.router.choice.explain())


def test_custom_ops_run_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator in compiled code asks again whether the kernel takes the tensors."""
    case, made = Case(60, 4, scores="sigmoid", groups=(4, 2, 2), biased=True, pads=True), list[str]()
    p, run = choice.problem("cpu", case), kernel.forward
    expected = choice.chosen(p)
    monkeypatch.setattr(kernel, "forward", lambda *arguments: (made.append("forward"), run(*arguments)))
    rule = vars(p.rule).values()
    ours = torch.ops.fusible.choose_experts(p.logits, *rule, p.bias, p.valid, None)

    assert made == ["forward"]
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))
    d = [torch.ones_like(expected.weights), torch.ones(60), torch.ones(1)]
    grad = torch.ops.fusible.choose_experts_backward(p.logits, *rule, expected.ids, *d)
    assert torch.equal(grad, choice.gradient(p, expected.ids, *d))
