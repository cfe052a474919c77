"""How often, when and for whom a parametrization computes: once for each run of an op, as in ``torch.nn``."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from reference import unit
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fusible import (
    Activation,
    ArgumentError,
    Bias,
    FusedOp,
    GroupedLinear,
    Linear,
    Op,
    Pattern,
    Sequential,
    SwiGLU,
    config,
    register_fusion,
)

E, K, F, T = 3, 4, 6, 10
SIZES = torch.tensor([3, 0, 5])
FUSED = [set(), {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}]
NAMES = ["weight", "bias", "weight0", "bias1"]


class Counted(nn.Module):
    """Twice the weight; counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return 2 * weight


class Dropped(nn.Module):
    """Gives something else each time."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.5)


class Turned(nn.Module):
    """Keeps the transposed weight."""

    def forward(self, kept: Tensor) -> Tensor:
        return kept.mT

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.mT.contiguous()


class Cut(nn.Module):
    """Leaves out a column."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight[..., 1:]


def mlp(name: str = "weight", **how: bool) -> Sequential:
    torch.manual_seed(0)
    single = name in ("weight", "bias")
    options = {"single_grouped_weight": single, "single_grouped_bias": single, **how}
    return models.mlp(E, K, F, dtype=torch.float64, **options)


def keywords() -> dict[str, Tensor]:
    return {"split_sizes": SIZES, "scales": torch.linspace(0.5, 1.5, T, dtype=torch.float64)}


def counted(op: nn.Module, name: str) -> Counted:
    counter = Counted()
    parametrize.register_parametrization(op, name, counter)
    counter.calls = 0
    return counter


def step(model: nn.Module, x: Tensor, **given: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x, **given)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------------------------------------- threads


def test_threads_with_models_of_their_own_see_new_weights() -> None:
    models, seen = [Sequential(Linear(64, 64, bias=False)) for _ in range(2)], [[], []]
    for model in models:
        parametrize.register_parametrization(model[0], "weight", Counted())

    def work(i: int) -> None:
        for k in range(200):
            with torch.no_grad():
                models[i][0].parametrizations.weight.original.fill_(float(k))
            seen[i].append(float(models[i](torch.eye(64))[0, 0].detach()))

    in_threads(work, 2)
    assert seen == [[2.0 * k for k in range(200)]] * 2


@pytest.mark.parametrize("disabled", FUSED)
def test_threads_share_a_model(disabled: set[str]) -> None:
    model, given, errors = mlp(), keywords(), []
    parametrize.register_parametrization(model[0], "weight", Counted())

    def work(_: int) -> None:
        try:
            with config(disable_fusions=disabled):
                for _ in range(20):
                    model(unit(T, K), **given).sum().backward()
        except RuntimeError as error:
            errors.append(error)

    in_threads(work, 8)
    assert errors == []


# ---------------------------------------------------------------------------------------------------------- how often


def eager(model: nn.Module) -> Any:
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("disabled", FUSED)
def test_a_run_computes_once(disabled: set[str], name: str) -> None:
    model, x = mlp(name), unit(T, K)
    counters = [counted(model[index], name) for index in (0, 3)]
    with config(disable_fusions=disabled):
        for calls in (1, 2, 3):
            step(model, x, **keywords())
            assert [counter.calls for counter in counters] == [calls, calls]
        with torch.no_grad():
            model(x, **keywords())
            assert [counter.calls for counter in counters] == [4, 4]


@pytest.mark.parametrize("op", [Linear(K, K), Bias(K)], ids=["linear", "bias"])
@pytest.mark.parametrize("wrap", [eager, Sequential, lambda op: Sequential(nn.Identity(), op)])
def test_a_run_of_other_ops_computes_once(wrap: Callable[[nn.Module], nn.Module], op: nn.Module) -> None:
    op = copy.deepcopy(op)
    counter, hooked = counted(op, "bias"), []
    for calls in (1, 2):
        step(wrap(op), unit(T, K, dtype=torch.float32))
        assert counter.calls == calls
    op.register_forward_hook(lambda *_: hooked.append(1))
    step(wrap(op), unit(T, K, dtype=torch.float32))
    assert (counter.calls, hooked) == (3, [1])


def test_a_scope_of_torchs_cache_computes_once() -> None:
    model = Sequential(Linear(K, K))
    counter = counted(model[0], "weight")
    with parametrize.cached():
        for _ in range(3):
            model(unit(T, K, dtype=torch.float32))
    assert counter.calls == 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("run", [eager, compiled], ids=["eager", "compiled"])
def test_spectral_norm_is_torchs(run: Callable[[nn.Module], Any], mode: str) -> None:
    ours, plain = Sequential(Linear(K, F), Linear(F, K)), nn.Sequential(nn.Linear(K, F), nn.Linear(F, K))
    plain.load_state_dict(ours.state_dict())
    for model in (ours, plain):
        for op in model:
            torch.manual_seed(1)
            parametrizations.spectral_norm(op)
        getattr(model, mode)()
    models = run(ours), plain
    for _ in range(3):
        x = unit(T, K, dtype=torch.float32)
        results = [step(model, x) for model in models]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*[list(model.buffers()) for model in (ours, plain)])


def test_random_parametrizations_draw_what_torchs_draw() -> None:
    ours = Sequential(Linear(K, F), nn.Dropout(), Linear(F, K))
    plain = nn.Sequential(nn.Linear(K, F), nn.Dropout(), nn.Linear(F, K))
    plain.load_state_dict(ours.state_dict())
    for model in (ours, plain):
        for op in (model[0], model[2]):
            parametrize.register_parametrization(op, "weight", Dropped())
            parametrize.register_parametrization(op, "bias", Dropped())
    results: list[Any] = []
    for model in (ours, plain):
        torch.manual_seed(3)
        results.append([step(model, unit(T, K, dtype=torch.float32)) for _ in range(3)])

    torch.testing.assert_close(*results)


# ------------------------------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("disabled", FUSED)
def test_checkpointing_from_the_first_call_on(disabled: set[str], name: str, reentrant: bool) -> None:
    model, plain = mlp(name), mlp(name)
    for each in (model, plain):
        parametrize.register_parametrization(each[3], name, nn.Tanh())

    def kept(x: Tensor, **given: Tensor) -> Tensor:
        return checkpoint(lambda t: model(t, **given), x, use_reentrant=reentrant)

    module = nn.Module()
    module.inner, module.forward = model, kept
    with config(disable_fusions=disabled):
        for _ in range(3):
            x = unit(T, K)
            torch.testing.assert_close(*[step(each, x, **keywords()) for each in (module, plain)])


# ------------------------------------------------------------------------------------------- what needs not be computed


@pytest.mark.parametrize("name", NAMES)
def test_explain_computes_nothing(name: str) -> None:
    model = mlp(name)
    counter = counted(model[0], name)
    explanation = model.explain(unit(T, K), **keywords())

    assert counter.calls == 0
    assert [s.name for s in explanation.steps] == ["GroupedMLP"]
    model(unit(T, K), **keywords())
    assert (str(model.explain()), counter.calls) == (str(explanation), 1)


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_explain_leaves_buffers_as_they_are(norm: Callable[..., nn.Module]) -> None:
    model = Sequential(norm(Linear(K, F)), SwiGLU())
    before = [b.clone() for b in model.buffers()]

    assert model.explain(unit(T, K, dtype=torch.float32)).steps[0].shape == (T, F)
    torch.testing.assert_close(list(model.buffers()), before, rtol=0, atol=0)


class Scaled(FusedOp):
    """A bias and a gain in one."""

    def fwd(self, x: Tensor) -> tuple[Tensor, Any]:
        return (x + self.bias.bias) * self.gain.gain, {"bias": None, "gain": (x + self.bias.bias, self.gain.gain)}


@pytest.mark.parametrize("trains", [True, False])
def test_conditions_read_what_will_be_computed(trains: bool) -> None:
    pattern = Pattern.path(bias=Bias, gain=Gain).where("the gain is frozen", lambda m: m.gain.gain.requires_grad)
    model, x = Sequential(Bias(K), Gain(True)), unit(T, K, dtype=torch.float32)
    model[1].gain.requires_grad_(trains)
    counters = [counted(op, name) for op, name in zip(model, ("bias", "gain"), strict=True)]
    register_fusion(pattern)(Scaled)
    names = ["Scaled"] if trains else ["ParametrizedBias", "ParametrizedGain"]
    assert [s.name for s in model.explain(x).steps] == names
    assert [counter.calls for counter in counters] == [0, 0]
    got = step(model, x)

    assert [counter.calls for counter in counters] == [1, 1]
    torch.testing.assert_close(got, step(model, x))


def test_wrong_arguments_raise_before_anything_is_computed() -> None:
    model, output = mlp(), torch.zeros(T, K, dtype=torch.float64)
    counters = [counted(model[index], "weight") for index in (0, 3)]
    given = {**keywords(), "scales": torch.ones(T - 1)}
    for disabled in FUSED:
        with config(disable_fusions=disabled), pytest.raises(ArgumentError, match=r"op 2 \(Scale\): scales: expected"):
            model(unit(T, K), op_kwargs={3: {"output": output}}, **given)
    with pytest.raises(ArgumentError, match="split_sizes: expected"):
        model[0](unit(T, K), split_sizes=SIZES[:2])

    assert [counter.calls for counter in counters] == [0, 0]
    assert not output.any()


@pytest.mark.parametrize("first", [[], [nn.Identity()]], ids=["first", "behind a module"])
def test_what_is_computed_may_be_of_another_form_than_what_is_kept(first: list[nn.Module]) -> None:
    model, plain = Sequential(*first, Linear(K, F)), nn.Sequential(*first, nn.Linear(K, F))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        parametrize.register_parametrization(each[-1], "weight", Turned())
    x = unit(T, K, dtype=torch.float32)

    torch.testing.assert_close(*[step(each, x) for each in (model, plain)])
    grouped = GroupedLinear(1, K, F)
    for op in (model[-1], grouped):
        parametrize.register_parametrization(op, "weight", Cut(), unsafe=True)
    with pytest.raises(ArgumentError, match=rf"op {len(first)} \(ParametrizedLinear\): weight: expected a parameter"):
        model(x)
    with pytest.raises(ArgumentError, match="ParametrizedGroupedLinear: weight: expected a parameter of shape"):
        grouped(x, split_sizes=[T])


class Gain(Op):
    """Multiplies by its parameter; counts its runs; returns as ``Saved`` what it is told to."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.gain, self.saves, self.runs = nn.Parameter(torch.full((K,), 3.0)), saves, 0

    def fwd(self, x: Tensor) -> tuple[Tensor, Any]:
        self.runs += 1
        return x * self.gain, (x, self.gain if self.saves else None)

    def bwd(self, saved: Any, dy: Tensor) -> dict[str, Any]:
        x, gain = saved
        return {"x": dy * (gain if self.saves else self.gain), "gain": lambda: (dy * x).sum(0).to(self.gain.dtype)}


def test_a_run_assigns_to_the_op_itself() -> None:
    op = Gain(True)
    counter = counted(op, "gain")
    _, dx, gradient = step(Sequential(op), x := unit(T, K, dtype=torch.float32))

    assert (op.runs, counter.calls) == (1, 1)
    torch.testing.assert_close([dx, gradient], [72 * x, 2 * 12 * x.square().sum(0)])


def test_values_live_no_longer_than_what_they_were_saved_for() -> None:
    op, alive = Linear(K, F), list[weakref.ref[Tensor]]()
    for name in ("weight", "bias"):
        parametrize.register_parametrization(op, name, nn.Tanh())
        op.parametrizations[name].register_forward_hook(lambda *seen: alive.append(weakref.ref(seen[-1])))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.shape, torch.zeros):
        y = op(unit(T, K, dtype=torch.float32))

    assert [value() is None for value in alive] == [True, True]
    y.sum().backward()
    assert op.parametrizations.weight.original.grad is not None


def test_an_op_at_two_places_computes_for_each() -> None:
    op, given = GroupedLinear(E, K, K, dtype=torch.float64), keywords()
    parametrize.register_parametrization(op, "weight", Dropped())
    counter, model, results = counted(op, "bias"), Sequential(op, Activation("relu"), op), []
    for disabled in FUSED:
        torch.manual_seed(2)
        with config(disable_fusions=disabled):
            results.append(step(model, torch.ones(T, K, dtype=torch.float64), split_sizes=given["split_sizes"]))

    torch.testing.assert_close(*results)
    assert counter.calls == 4


def test_a_backward_that_reads_what_was_computed_says_so() -> None:
    op = Gain(False)
    parametrize.register_parametrization(op, "gain", Counted())

    with pytest.raises(RuntimeError, match=r"Gain: the values of gain are computed when fwd runs, .* fwd must return"):
        step(op, unit(T, K, dtype=torch.float32))


# --------------------------------------------------------------------------------------------------------------- copies


@pytest.fixture(params=NAMES)
def called(request: pytest.FixtureRequest) -> Sequential:
    model = mlp(request.param)
    for name in (request.param, {"weight": "bias", "bias": "weight"}.get(request.param, "bias0")):
        parametrize.register_parametrization(model[0], name, Counted())
    for disabled in FUSED:
        with config(disable_fusions=disabled):
            step(model, unit(T, K), **keywords())
    return model


def test_a_copy_after_a_call(called: Sequential) -> None:
    copied, x = copy.deepcopy(called), unit(T, K)

    torch.testing.assert_close(*[step(model, x, **keywords()) for model in (called, copied)])
    assert not {p.data_ptr() for p in called.parameters()} & {p.data_ptr() for p in copied.parameters()}


def test_an_average_after_a_call(called: Sequential) -> None:
    averaged, x = AveragedModel(called), unit(T, K)
    averaged.update_parameters(called)

    torch.testing.assert_close(averaged(x, **keywords()), called(x, **keywords()))
    assert averaged.n_averaged == 1


def test_a_copy_leaves_delayed_gradients_to_the_original() -> None:
    model, plain, x = mlp(delay_wgrad_compute=True), mlp(), unit(T, K)
    parametrize.register_parametrization(model[0], "bias", Counted())
    step(model, x, **keywords())
    copied = copy.deepcopy(model)

    assert [op.has_delayed_wgrad() for op in (model[0], copied[0])] == [True, False]
    copied[0].backward_dw()
    assert model[0].weight.grad is None
    model[0].backward_dw()
    parametrize.register_parametrization(plain[0], "bias", Counted())
    step(plain, x, **keywords())
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
