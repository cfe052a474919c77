"""Plans: compiled once a signature, straight-line, keeping nothing that is not read any more."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from models import mlp
from torch import Tensor, nn

from fusible import (
    AddExtraInput,
    ArgumentError,
    Bias,
    ConstantScale,
    Identity,
    Linear,
    MakeExtraOutput,
    Pattern,
    Sequential,
    SwiGLU,
    TensorSpec,
    config,
    register_fusion,
)
from fusible.fuser import FusedOp
from fusible.fuser.compiler import binding, graph, plan
from fusible.fuser.container import call_cache
from fusible.fuser.contract.config import Config, active_config, config_of

X = torch.randn(3, 4)
SIZES = torch.tensor([2, 1])
ONES = torch.ones(3)


@pytest.fixture
def compiled(monkeypatch):
    """Grows by one whenever a plan is compiled."""
    plans, compile_plan = [], call_cache.compile_plan

    def counted(*args):
        plans.append(compile_plan(*args))
        return plans[-1]

    monkeypatch.setattr(call_cache, "compile_plan", counted)
    return plans


# ------------------------------------------------------------------------------------------------- the cache


def test_same_call_is_compiled_once(compiled):
    model = mlp()
    for _ in range(3):
        model(X, split_sizes=SIZES, scales=ONES)

    assert len(compiled) == 1


def test_explain_shares_the_plans_of_calls(compiled):
    model = mlp()
    model.explain(X, split_sizes=SIZES, scales=ONES)
    model(X, split_sizes=SIZES, scales=ONES)
    model.explain()

    assert len(compiled) == 1


def test_values_and_rows_may_change(compiled):
    model = mlp()
    for rows in (3, 5, 0):
        sizes = torch.tensor([rows, 0])
        assert model(torch.randn(rows, 4), split_sizes=sizes, scales=torch.rand(rows)).shape == (rows, 4)

    assert len(compiled) == 1


def test_lists_of_sizes_may_change(compiled):
    model = mlp()
    for sizes in ([2, 1], [1, 2]):
        model(X, split_sizes=sizes, scales=ONES)

    assert len(compiled) == 1


def test_train_eval_and_no_grad_alternate_without_recompilation(compiled):
    model = mlp()
    for _ in range(3):
        for mode in (True, False):
            model.train(mode)
            with torch.set_grad_enabled(mode):
                model(X, split_sizes=SIZES, scales=ONES)

    assert len(compiled) == 2  # with and without grad


def on_meta(model):
    x, sizes, ones = (t.to("meta") for t in (X, SIZES, ONES))
    model.to("meta")(x, sizes, ones, sizes)


CHANGES = {
    "device": on_meta,
    "aliasing": lambda m: m(X, SIZES, ONES, SIZES.clone()),
    "dtype of x": lambda m: m.double()(X.double(), SIZES, ONES, SIZES),
    "dtype of a keyword": lambda m: m(X, SIZES, ONES.double(), SIZES),
    "requires_grad of x": lambda m: m(X.clone().requires_grad_(), SIZES, ONES, SIZES),
    "requires_grad of a keyword": lambda m: m(X, SIZES, ONES.clone().requires_grad_(), SIZES),
    "requires_grad of a parameter": lambda m: m.requires_grad_(False)(X, SIZES, ONES, SIZES),
    "a keyword more": lambda m: m(X, SIZES, ONES, SIZES, op_kwargs={3: {"output": torch.empty(3, 4)}}),
    "a list for a tensor": lambda m: m(X, ONES, split_sizes=[2, 1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_decision_may_read_recompiles(change, compiled):
    model = mlp()
    model(X, SIZES, ONES, SIZES)
    change(model)

    assert len(compiled) == 2


def test_freezing_a_parameter_of_any_op_recompiles(compiled):
    model = Sequential(Linear(4, 4), Bias(4))
    for flag in (True, False, True):
        model[1].bias.requires_grad_(flag)
        model(X)

    assert len(compiled) == 2


@pytest.mark.parametrize(
    "context",
    [
        lambda: config(debug=True),
        lambda: config(backend="loop"),
        lambda: config(disable_fusions={"GroupedMLP"}),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.no_grad,
    ],
)
def test_config_autocast_and_grad_mode_have_plans_of_their_own(context, compiled):
    model = mlp()
    for _ in range(2):
        model(X, split_sizes=SIZES, scales=ONES)
        with context():
            model(X, split_sizes=SIZES, scales=ONES)

    assert len(compiled) == 2


def test_registration_recompiles(compiled):
    model = mlp()
    model(X, split_sizes=SIZES, scales=ONES)
    register_fusion(Pattern.path(a=Identity))(NeedsNothing)
    model(X, split_sizes=SIZES, scales=ONES)

    assert len(compiled) == 2


class NeedsNothing(FusedOp):
    def fwd(self, x):
        return x, None


def test_meta_tensors_are_planned():
    model = mlp().to("meta")

    assert model(X.to("meta"), split_sizes=SIZES.to("meta"), scales=ONES.to("meta")).shape == (3, 4)


# ------------------------------------------------------------------------------------------------- what is kept


class Watched(nn.Module):
    """Holds a weak reference to its input."""

    def forward(self, x):
        self.seen = weakref.ref(x)
        return x + 1


def test_intermediate_outputs_are_freed_once_read():
    alive = []
    watched = Watched()

    class Asks(nn.Module):
        def forward(self, x):
            alive.append(watched.seen() is not None)
            return x

    Sequential(ConstantScale(2.0), watched, Asks())(X)

    assert alive == [False]


def test_container_keeps_no_tensor_of_a_call():
    model, x = mlp(), torch.randn(3, 4)
    with torch.no_grad():
        model(x, split_sizes=SIZES, scales=ONES)
    seen = weakref.ref(x)
    del x

    assert seen() is None


def test_ops_run_in_order_around_channels_and_fusions():
    ran = []

    class Noted(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            ran.append(self.name)
            return x

    ops = [Noted("a"), MakeExtraOutput("r"), Noted("b"), ConstantScale(2.0), AddExtraInput("r"), Noted("c")]
    Sequential(*ops)(X)

    assert ran == ["a", "b", "c"]


# ------------------------------------------------------------------------------------------------- profiler


def test_profiler_shows_every_step_and_backward():
    model = Sequential(*mlp(), nn.Identity())
    with torch.profiler.profile() as profile:
        model(X, split_sizes=SIZES, scales=ONES).sum().backward()
    names = {event.name for event in profile.events()}

    assert {"fusible::GroupedMLP", "fusible::GroupedMLP.bwd", "fusible::Identity"} <= names


# ------------------------------------------------------------------------------------------------- switches


class Reads(Identity):
    """Notes the switches in force in both halves."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def fwd(self, x: Tensor):
        self.seen.append(active_config().backend)
        return x * 1, None

    def bwd(self, saved, dy):
        self.seen.append(active_config().backend)
        return {"x": dy}


def test_backward_runs_under_the_switches_of_its_forward():
    op = Reads()
    with config(backend="loop"):
        y = op(X.clone().requires_grad_())
    y.sum().backward()

    assert op.seen == ["loop", "loop"]
    assert active_config().backend == "auto"


def test_switches_do_not_leak_into_another_thread():
    op = Reads()
    with config(backend="loop"):
        thread = threading.Thread(target=op, args=(X,))
        thread.start()
        thread.join()

    assert op.seen == ["auto"]


def test_switches_nest_and_are_restored():
    with config(backend="loop", debug=True):
        with config(backend="grouped_mm") as inner:
            assert (inner.backend, inner.debug) == ("grouped_mm", True)
            assert active_config() is inner
        assert active_config().backend == "loop"

    assert active_config() is config_of()


def test_switches_are_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), config(debug=True):
        _ = 1 / 0

    assert not active_config().debug


def test_two_threads_may_share_a_container():
    model, results = mlp(), []
    expected = model(X, split_sizes=SIZES, scales=ONES)

    def work():
        results.extend(model(X, split_sizes=SIZES, scales=ONES) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 40
    assert all(torch.equal(y, expected) for y in results)


# ------------------------------------------------------------------------------------------------- checks


def test_shapes_that_have_passed_are_not_checked_again(monkeypatch):
    monkeypatch.setattr("fusible.fuser.compiler.plan.checks_values", lambda *_: False)  # as on a device
    model, checked = mlp(), []
    check = SwiGLU.check
    monkeypatch.setattr(SwiGLU, "check", lambda self, x: checked.append(x.shape[0]) or check(self, x))
    for rows in (3, 3, 5, 3, 5):
        model(torch.randn(rows, 4), split_sizes=SIZES, scales=torch.ones(rows))
    with pytest.raises(ArgumentError, match=r"scales: expected shape \[3\]"):
        model(X, split_sizes=SIZES, scales=torch.ones(4))

    assert checked == [3, 5, 3]


@pytest.mark.parametrize("where", ["host", "device", "debug"])
def test_values_are_checked_where_they_can_be_read(where):
    cuda = TensorSpec((), torch.float32, torch.device("cuda" if where != "host" else "cpu"))
    switches = Config(debug=where == "debug")
    model = mlp()
    found = graph.OpGraph.of(model._current().layout, binding.BoundArguments([X], ((), (), (), ())))
    found.nx.nodes[".x"]["spec"] = cuda

    assert plan.checks_values(found, switches) == (where != "device")


def test_a_check_of_ones_own_is_always_asked():
    class Checked(SwiGLU):
        def check(self, x):
            return super().check(x)

    assert SwiGLU.promises.values_checked == frozenset()
    assert Checked.promises.values_checked is None


# ------------------------------------------------------------------------------------------------- forms of calls


def test_one_tensor_for_two_keywords_is_another_form_of_call(compiled):
    model, sizes = mlp(), SIZES.clone()
    for first, second in ((SIZES, SIZES), (SIZES, sizes), (sizes, sizes), (SIZES, SIZES)):
        model(X, first, ONES, second)

    assert [p.steps[0].name for p in compiled] == ["GroupedMLP", "GroupedLinearGLU"]


def test_a_keyword_that_is_none_is_not_given():
    model, buffer = mlp(), torch.empty(3, 4)
    for output in (None, buffer, None):
        y = model(X, split_sizes=SIZES, scales=ONES, op_kwargs={3: {"output": output}})
        assert (y.data_ptr() == buffer.data_ptr()) == (output is not None)


def test_a_key_that_is_true_is_not_the_key_one():
    model = mlp()
    model(X, split_sizes=SIZES, op_kwargs={2: {"scales": ONES}})
    model(X, split_sizes=SIZES, scales=ONES, op_kwargs={1: {}})

    with pytest.raises(ArgumentError, match="True is a bool"):
        model(X, split_sizes=SIZES, scales=ONES, op_kwargs={True: {}})
