"""Calls like the last one: they are neither bound nor looked up, and whatever differs is noticed.

The stub of the extension computes nothing, so what is compared is what a replay is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fusible import Activation, ArgumentError, GroupedLinear, Scale, Sequential, SwiGLU, config, explain
from fusible.benchmarks.stub_extension import launching_nothing
from fusible.fuser import replay
from fusible.fuser.container import call_cache
from fusible.fuser.container.repeated_call import RepeatedCall
from fusible.fuser.replay import calls
from fusible.ops.routed.gate import Gate

GROUPS, FEATURES, SIZES = 2, 16, torch.tensor([3, 1])


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with launching_nothing():
        yield


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a call is bound: none that is repeated is."""
    count, bind = list[int](), call_cache.bind
    monkeypatch.setattr(call_cache, "bind", lambda *args: count.append(1) or bind(*args))
    return count


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The addresses in the pool of each replay."""
    seen, run = list[list[int]](), calls.CapturedCall.run

    def noted(captured: Any, pool: list[Any], rows: int) -> Any:
        seen.append([tensor.data_ptr() for tensor in pool])
        return run(captured, pool, rows)

    monkeypatch.setattr(calls.CapturedCall, "run", noted)
    return seen


class Experts:
    """A model and its arguments."""

    def __init__(self, single: bool = True) -> None:
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "single_grouped_weight": single}
        self.fc1 = GroupedLinear(GROUPS, FEATURES, 2 * FEATURES, **options)
        self.scale, self.fc2 = Scale(), GroupedLinear(GROUPS, FEATURES, FEATURES, **options)
        self.model = Sequential(self.fc1, SwiGLU(), self.scale, self.fc2)
        self.give()

    def give(self, rows: int = 4) -> None:
        self.x, self.scales = torch.randn(rows, FEATURES, dtype=torch.bfloat16), torch.rand(rows)

    def call(self) -> Tensor:
        y: Tensor = self.model(self.x, split_sizes=SIZES, scales=self.scales)
        return y

    def warm(self) -> Experts:
        """Until the next call like this one is repeated: after one that is seen, one captured, two replayed."""
        for _ in range(4):
            self.call()
        assert isinstance(self.model._compiled.repeated, RepeatedCall)  # type: ignore[union-attr]
        return self


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_a_replay_like_the_last_one_is_not_bound(
    bound: list[int], pools: list[list[int]], grad: bool, single: bool
) -> None:
    experts, replayed = Experts(single), replay.stats().replayed
    with torch.set_grad_enabled(grad):
        outputs = [experts.call() for _ in range(6)]

    assert len(bound) == 4
    assert replay.stats().replayed == replayed + 4
    assert pools[0] == pools[-1]
    assert [y.requires_grad for y in outputs] == [grad] * 6


def test_other_tensors_of_the_form_are_given(bound: list[int], pools: list[list[int]]) -> None:
    experts = Experts().warm()
    experts.give()
    experts.fc2._parameters["weight"] = nn.Parameter(experts.fc2.one_parameter("weight").detach().clone())
    experts.call()

    assert len(bound) == 4
    given = {t.data_ptr() for t in (experts.x, experts.scales, SIZES, *experts.model.parameters())}
    assert set(pools[-1]) == given != set(pools[-2])


def test_keywords_in_another_order_than_the_ops(bound: list[int], pools: list[list[int]]) -> None:
    experts = Experts().warm()
    for _ in range(4):
        experts.model(experts.x, scales=experts.scales, split_sizes=SIZES)

    assert len(bound) == 4 + 1
    assert all(pool == pools[0] for pool in pools)


def test_a_keyword_that_was_none_is_not_left_out(bound: list[int]) -> None:
    experts = Experts()
    given: dict[str, Any] = {"split_sizes": SIZES, "output": None, "scales": experts.scales}
    for _ in range(6):
        experts.model(experts.x, **given)

    assert replay.stats().replayed
    assert len(bound) == 6


class ByItsPlan:
    """A plan whose runs can be told from replays."""

    def __call__(self, values: list[Any], *args: Any) -> str:
        return "run by its plan"


class Seen(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CHANGES: dict[str, Callable[[Experts], Any]] = {
    "rows": lambda experts: experts.give(6),
    "a gradient": lambda experts: experts.x.requires_grad_(),
    "the form of scales": lambda experts: setattr(experts, "scales", experts.scales.bfloat16()),
    "a subclass": lambda experts: setattr(experts, "scales", nn.Parameter(experts.scales)),
    "a weight that is not trained": lambda experts: experts.fc2.weight.requires_grad_(False),
    "a hook": lambda experts: experts.scale.register_forward_hook(lambda *args: None),
    "an attribute": lambda experts: setattr(experts.fc2, "num_groups", GROUPS),
    "an op": lambda experts: experts.model.__setitem__(1, SwiGLU()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(bound: list[int], change: str) -> None:
    experts = Experts().warm()
    CHANGES[change](experts)
    experts.call()

    assert len(bound) == 5


SWITCHES: dict[str, Callable[[], Any]] = {
    "a fusion": lambda: config(disable_fusions={"GroupedMLP"}),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "a dispatch mode": Seen,
    "forward-mode gradients": forward_ad.dual_level,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_are_noticed(bound: list[int], switch: str) -> None:
    experts = Experts().warm()
    with SWITCHES[switch]():
        experts.call()

    assert len(bound) == 5


def test_one_tensor_for_two_keywords_is_noticed(bound: list[int]) -> None:
    fc1 = GroupedLinear(GROUPS, FEATURES, 2 * FEATURES, dtype=torch.bfloat16, scale_bias=True)
    model = Sequential(
        fc1, SwiGLU(), Scale(), GroupedLinear(GROUPS, FEATURES, FEATURES, bias=False, dtype=torch.bfloat16)
    )
    given = {"split_sizes": SIZES, "bias_scale": torch.rand(4), "scales": torch.rand(4)}
    x = torch.randn(4, FEATURES, dtype=torch.bfloat16)
    for _ in range(5):
        model(x, **given)
    before = len(bound)
    model(x, **given | {"scales": given["bias_scale"]})

    assert (before, len(bound)) == (4, 5)


def test_other_numbers_of_arguments_are_noticed() -> None:
    experts = Experts()

    def call(*extra: Tensor) -> Any:
        return experts.model(experts.x, *extra, split_sizes=SIZES)

    for _ in range(4):
        call(experts.scales)
    with pytest.raises(ArgumentError, match="missing: op 2"):
        call()
    for _ in range(4):
        call(experts.scales)
    with pytest.raises(ArgumentError, match="got 2 extra inputs for 1"):
        call(experts.scales, SIZES.flip(0))


@pytest.mark.parametrize("x", [None, [1.0]])
@pytest.mark.parametrize("alone", [False, True])
def test_what_is_no_tensor_is_named(x: Any, alone: bool) -> None:
    experts = Experts().warm()
    op: Any = experts.fc1 if alone else experts.model
    keywords = {"split_sizes": SIZES} if alone else {"split_sizes": SIZES, "scales": experts.scales}
    for _ in range(4):
        op(experts.x, **keywords)

    with pytest.raises(ArgumentError, match="x: expected a tensor, got a "):
        op(x, **keywords)


def without_launches(experts: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(call_cache.current_stream, "cpu")


def without_alignment(experts: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    experts.x = torch.randn(4 * FEATURES + 1, dtype=torch.bfloat16)[1:].view(4, FEATURES)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_that_is_not_replayed_is_not_bound_either(bound: list[int], grad: bool) -> None:
    gate, weight = Gate(), torch.randn(8, FEATURES, requires_grad=grad)
    tokens = [torch.randn(rows, FEATURES, requires_grad=grad) for rows in (4, 4, 4, 4, 4, 6, 4)]
    seen = [(gate(x, weight=weight), len(bound)) for x in tokens]

    assert [count for _, count in seen] == [1, 2, 3, 3, 3, 4, 5]
    for x, (logits, _) in zip(tokens, seen, strict=True):
        assert torch.equal(logits, F.linear(x, weight))
        if grad:
            dx, dweight = torch.autograd.grad(logits.sum(), [x, weight])
            torch.testing.assert_close((dx, dweight), (weight.sum(0).expand_as(x), x.sum(0).expand_as(weight)))
    explanation = explain(gate)
    assert explanation.steps[0].shape == (4, 8)
    assert explanation.replay == "not replayed: Gate does not promise to be replayable"


@pytest.mark.parametrize("change", ["a hook", "debug", "a dtype", "other rows", *SWITCHES])
def test_what_changes_a_plan_is_noticed(bound: list[int], change: str) -> None:
    gate, weight, x = Gate(), torch.randn(8, FEATURES), torch.randn(4, FEATURES)
    for _ in range(5):
        gate(x, weight=weight)
    before = len(bound)
    if change == "a hook":
        gate.register_forward_pre_hook(lambda *args: None)
    with SWITCHES.get(change, lambda: config(debug=change == "debug"))():
        gate(x[:3] if change == "other rows" else x, weight=weight.bfloat16() if change == "a dtype" else weight)

    assert (before, len(bound)) == (3, 4)


@pytest.mark.parametrize("change", [without_launches, without_alignment])
def test_what_cannot_be_replayed_is_noticed(
    bound: list[int], monkeypatch: pytest.MonkeyPatch, change: Callable[[Experts, pytest.MonkeyPatch], None]
) -> None:
    experts = Experts().warm()
    change(experts, monkeypatch)
    monkeypatch.setattr(experts.model._compiled, "plan", lambda *args: ByItsPlan())

    assert experts.call() == "run by its plan"
    assert len(bound) == 5


def test_explain_tells_of_the_repeated_replay() -> None:
    experts = Experts().warm()
    experts.give(6)
    experts.call()
    assert "6x16" in str(experts.model.explain())
    experts.give()
    for _ in range(3):
        experts.call()

    explanation = experts.model.explain()
    assert "4x16" in str(explanation)
    assert explanation.replay == "replayed"


def test_a_parameter_of_two_ops_is_not_replayed() -> None:
    """Later it might be two parameters of the same form, of which a capture would not tell which is read where."""
    options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
    fc1, fc2 = (GroupedLinear(GROUPS, FEATURES, FEATURES, **options) for _ in range(2))
    fc2.weight = fc1.weight
    model, x = Sequential(fc1, Activation("silu"), fc2), torch.randn(4, FEATURES, dtype=torch.bfloat16)
    before = replay.stats()
    for _ in range(4):
        model(x, split_sizes=SIZES)

    assert replay.stats() == before
    assert model.explain().replay == "not replayed: two of its tensors are one"
