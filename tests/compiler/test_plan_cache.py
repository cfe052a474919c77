"""The plan cache of a container: no plan that cannot be used again, not too many, never one of other calls."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from models import mlp

from fusible import (
    Activation,
    ConstantScale,
    Pattern,
    Scale,
    Sequential,
    config,
    register_fusion,
    unregister,
)
from fusible.fuser import FusedOp
from fusible.fuser.compiler import flatten as layout
from fusible.fuser.compiler.recent import Recent
from fusible.fuser.container import call_cache, sequential
from fusible.fuser.contract.config import _in_use

X = torch.randn(3, 4)
SIZES = torch.tensor([2, 1])
ONES = torch.ones(3)


@pytest.fixture
def compiled(monkeypatch):
    """Grows by one whenever a plan is compiled."""
    seen, compile_plan = [], call_cache.compile_plan

    def counted(*args):
        seen.append(None)
        return compile_plan(*args)

    monkeypatch.setattr(call_cache, "compile_plan", counted)
    return seen


def test_plans_of_fusions_that_are_gone_are_dropped():
    model = mlp()

    @register_fusion(Pattern.path(a=Scale, b=Scale))
    class Passing(FusedOp):
        def bwd(self, saved, dy, **keywords):
            return super().bwd(saved, dy, **keywords)

    for _ in range(20):
        unregister("Passing")
        model(X, split_sizes=SIZES, scales=ONES)
        register_fusion(Pattern.path(a=Scale, b=Scale))(Passing)
        model(X, split_sizes=SIZES, scales=ONES)

    assert len(model._compiled.plans) == 1


def test_the_last_call_is_explained_after_a_registration():
    model = mlp()
    model(X, split_sizes=SIZES, scales=ONES)
    unregister("GLUScale")
    model.explain(X, split_sizes=SIZES, scales=ONES)

    assert [step.name for step in model.explain().steps] == ["GroupedMLP"]


@pytest.mark.filterwarnings("ignore:config")
def test_plans_of_many_switches_are_bounded(compiled):
    model, before = mlp(), set(_in_use.keys())  # other tests' containers may live on
    for i in range(3 * call_cache._MANY_PLANS):
        with config(disable_fusions={f"nothing {i}"}):
            model(X, split_sizes=SIZES, scales=ONES)
        model(X, split_sizes=SIZES, scales=ONES)

    assert len(compiled) == 3 * call_cache._MANY_PLANS + 1  # what is used all the time stays
    assert len(model._compiled.plans) <= 2 * call_cache._MANY_PLANS
    model._compiled = None
    assert len(set(_in_use.keys()) - before) <= 4


@pytest.mark.filterwarnings("ignore:config")
def test_equal_switches_share_a_plan_though_others_came_between(compiled):
    model = mlp()
    for i in (0, 1, 0, 1):
        with config(disable_fusions={f"nothing {i}"}):
            model(X, split_sizes=SIZES, scales=ONES)

    assert len(compiled) == 2


def test_recent_values_are_kept_and_earlier_ones_go():
    recent = Recent(2)
    for key in "abc":
        recent.add(key, key.upper())

    assert recent.young.get("a") is None
    assert recent.from_old("a") == "A"
    recent.add("d", "D")
    assert recent.from_old("b") is None
    assert recent.values() == ["C", "A", "D"]


def test_first_calls_of_several_threads_keep_their_forms_apart(monkeypatch):
    class Slow(layout.FlatContainer):
        """One that all threads build, since none of them finds that of another."""

        def __init__(self, *args):
            super().__init__(*args)
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(1)

    def call(a, b, c):
        return float(model(torch.ones(1, 1), a, b, c))

    monkeypatch.setattr(sequential, "FlatContainer", Slow)
    p, q = torch.tensor([2.0]), torch.tensor([3.0])
    forms = [((p, p, q), 192.0), ((p, q, q), 432.0), ((p, q, p), 288.0)]
    wrong = []
    for _ in range(40):
        model = Sequential(Scale(), Activation("relu2"), Scale(), Activation("relu2"), Scale())
        together = threading.Barrier(len(forms))
        threads = [threading.Thread(target=call, args=form) for form, _ in forms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wrong += [(call(*form), expected) for _ in range(2) for form, expected in forms if call(*form) != expected]

    assert wrong == []


def test_a_call_that_an_edit_overtakes_files_no_plan(monkeypatch):
    model = Sequential(ConstantScale(2.0))
    compile_plan = call_cache.compile_plan

    def overtaken(*args):
        plan = compile_plan(*args)
        if not edited:
            edited.append(True)
            model[0] = ConstantScale(3.0)
            assert torch.equal(model(X), 3 * X)
        return plan

    edited = []
    monkeypatch.setattr(call_cache, "compile_plan", overtaken)
    assert torch.equal(model(X), 2 * X)
    assert torch.equal(model(X), 3 * X)
