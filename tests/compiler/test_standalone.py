"""An op called by itself is a container of one that stays invisible."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from test_host_work import calls_of, gpu
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusible import (
    ArgumentError,
    Composite,
    ConstantScale,
    GroupedLinear,
    Linear,
    MakeExtraOutput,
    Pattern,
    Scale,
    Sequential,
    SwiGLU,
    explain,
    register_fusion,
)
from fusible.fuser import FusedOp, Grads, Op
from fusible.fuser.container import call_cache

X = torch.randn(3, 4)
SIZES = torch.tensor([2, 1])
__all__ = ["gpu"]  # the fixture


def plans_of(op: Op) -> list[Any]:
    return op._container_of_one.compiled.plans.values()


# ---------------------------------------------------------------------------------------------------- as in a container


def test_a_plan_serves_all_calls_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_plan = [], call_cache.compile_plan
    monkeypatch.setattr(call_cache, "compile_plan", lambda *args: compiled.append(args) or compile_plan(*args))
    op = Linear(4, 4)
    for rows in (3, 3, 5):
        op(torch.randn(rows, 4))

    assert len(compiled) == 1


def hot_calls(model: nn.Module, x: Tensor, **keywords: Any) -> int:
    for _ in range(4):
        model(x, **keywords)
    return calls_of(lambda: model(x, **keywords))


def test_a_hot_call_does_hardly_more_than_that_of_a_container() -> None:
    op = GroupedLinear(2, 4, 4)

    assert hot_calls(op, X, split_sizes=SIZES) <= hot_calls(Sequential(op), X, split_sizes=SIZES) + 3


def test_a_call_is_replayed(gpu: None) -> None:
    op = GroupedLinear(2, 8, 8, dtype=torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    of_container = hot_calls(Sequential(op), x, split_sizes=SIZES)

    assert of_container < 100
    assert hot_calls(op, x, split_sizes=SIZES) <= of_container + 3


def test_a_call_is_profiled() -> None:
    op = Linear(4, 4)
    with torch.profiler.profile() as profile:
        op(X)

    assert "fusible::Linear" in {event.key for event in profile.key_averages()}


def test_explain_tells_of_the_last_call() -> None:
    op = GroupedLinear(2, 4, 6)
    with pytest.raises(ArgumentError, match="no call yet"):
        explain(op)
    op(X, split_sizes=SIZES)
    explained = explain(op)

    assert explained.steps[0].shape == (3, 6)
    assert str(explained) == str(explain(op, X, split_sizes=SIZES)) == str(explain(Sequential(op), X, SIZES))
    assert str(explained) == str(explain(op, X, op_kwargs={op: {"split_sizes": SIZES}}))


def test_a_fusion_of_one_op_is_taken_and_returns_all_outputs() -> None:
    @register_fusion(Pattern.path(make=MakeExtraOutput))
    class Doubled(FusedOp):
        extra_outputs = ("extra",)
        output_to_caller = {"extra": False}

        def fwd(self, x: Tensor) -> Any:
            return {"y": 2 * x, "extra": x}, None

        def bwd(self, saved: None, dy: Tensor, *, extra: Tensor) -> Grads:
            return {"x": 2 * dy + extra}

    op = MakeExtraOutput()
    op.output_to_caller = {"extra": False}
    y, extra = op(X)

    assert explain(op).steps[0].name == "Doubled"
    assert torch.equal(y, 2 * X)
    assert torch.equal(extra, X)


def test_errors_name_the_op_by_its_class() -> None:
    with pytest.raises(ArgumentError, match=r"^Scale: scales: expected shape \[3\]"):
        Scale()(X, scales=torch.ones(2))
    with pytest.raises(ArgumentError, match=r"^missing: Scale needs 'scales'$"):
        Scale()(X)
    with pytest.raises(ArgumentError, match=r"^Scale takes no 'weights'; its keywords are: scales$"):
        Scale()(X, scales=torch.ones(3), weights=1)


# ---------------------------------------------------------------------------------------------------- code of the user


@pytest.mark.parametrize("wrap", [lambda op: op, Sequential], ids=["alone", "container"])
def test_hooks_run_once(wrap: Any) -> None:
    op, seen = Linear(4, 4), list[str]()
    op.register_forward_pre_hook(lambda *_: seen.append("before"))
    op.register_forward_hook(lambda *_: seen.append("after"))
    op.register_full_backward_hook(lambda *_: seen.append("backward"))
    for _ in range(3):
        wrap(op)(X.clone().requires_grad_()).sum().backward()

    assert seen == ["before", "after", "backward"] * 3


class Twice(Linear):
    def forward(self, x: Tensor, **keywords: Any) -> Any:
        return 2 * super().forward(x + 1, **keywords)


@pytest.mark.parametrize("wrap", [lambda op: op, Sequential], ids=["alone", "container"])
def test_a_forward_of_a_subclass_runs(wrap: Any) -> None:
    op = Twice(4, 4)

    torch.testing.assert_close(wrap(op)(X), 2 * nn.functional.linear(X + 1, op.weight, op.bias))


def test_explain_checks_no_arguments_that_a_hook_may_change() -> None:
    op = Linear(4, 4)
    op.register_forward_pre_hook(lambda _, args: (args[0][:, :4],))
    wide = torch.randn(3, 6)

    assert op(wide).shape == (3, 4)
    assert "hooks may change" in explain(op, wide).steps[0].reason


def test_what_an_op_assigns_to_itself_stays_with_it() -> None:
    class Counting(SwiGLU):
        calls = 0

        def fwd(self, x: Tensor, **keywords: Any) -> Any:
            self.calls += 1
            return super().fwd(x, **keywords)

    op = Counting()
    op(X), op(X)

    assert op.calls == 2
    assert len(plans_of(op)) == 1


# ---------------------------------------------------------------------------------------------------- edits


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_a_parametrization_counts_from_the_next_call_on() -> None:
    op = Linear(4, 4, bias=False)
    y = op(X)
    parametrize.register_parametrization(op, "weight", Half())
    torch.testing.assert_close(op(X), y / 2)
    parametrize.remove_parametrizations(op, "weight", leave_parametrized=False)

    torch.testing.assert_close(op(X), y)


def test_another_class_counts_from_the_next_call_on() -> None:
    class Negated(Linear):
        def fwd(self, x: Tensor, **keywords: Any) -> Any:
            return super().fwd(-x, **keywords)

    op = Linear(4, 4, bias=False)
    y = op(X)
    op.__class__ = Negated

    torch.testing.assert_close(op(X), -y)


def test_a_replaced_parameter_counts_from_the_next_call_on() -> None:
    op = Linear(4, 4, bias=False)
    op(X)
    op.weight = nn.Parameter(torch.zeros(4, 4))

    assert not op(X).any()


def test_a_replaced_part_of_a_composite_goes_at_once(collector_off: None) -> None:
    op = Composite(first=Linear(4, 4), then=Linear(4, 4))
    op(X)
    part = weakref.ref(op.first)
    op.first = Linear(4, 4)

    assert part() is None
    torch.testing.assert_close(op(X), op.then(op.first(X)))


# ---------------------------------------------------------------------------------------------------- nobody sees it


def test_nothing_of_it_is_in_the_attributes_or_the_state() -> None:
    op = Linear(4, 4)
    attributes, state, modules = dict(vars(op)), [*op.state_dict()], [*op.modules()]
    op(X)

    assert vars(op).keys() == attributes.keys()
    assert [*op.state_dict()] == state
    assert [*op.modules()] == modules


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_clone_has_none_of_it(clone: Any) -> None:
    op = ConstantScale(2.0)
    y = op(X)
    other = clone(op)

    assert not hasattr(other, "_container_of_one")
    assert torch.equal(other(X), y)


def test_an_op_that_refers_to_itself_is_collected() -> None:
    op = Linear(4, 4)
    op.register_forward_hook(lambda *_, op=op: None)
    op.fwd = op.fwd  # type: ignore[method-assign]
    op(X.clone().requires_grad_()).sum().backward()
    gone = weakref.ref(op)
    del op
    gc.collect()

    assert gone() is None
