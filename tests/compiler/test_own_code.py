"""Ops with code of their own, on the object, in a subclass, or in hooks: it runs, in a container as alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import steps
from torch import Tensor, nn

from fusible import (
    Activation,
    AddExtraInput,
    ArgumentError,
    FusedOp,
    GroupedLinear,
    Linear,
    MakeExtraOutput,
    Pattern,
    Scale,
    ScaledSwiGLU,
    Sequential,
    SwiGLU,
    config,
    register_fusion,
)
from fusible.fuser import Grads, replay
from fusible.fuser.replay.capture import Capture
from fusible.ops.values.activation_spec import ActivationSpec

E, K, F, SIZES = 3, 4, 6, [2, 0, 3]
FUSIONS = {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}


def mlp(first: type[GroupedLinear] = GroupedLinear, **how: Any) -> Sequential:
    return Sequential(first(E, K, 2 * F, **how), SwiGLU(), Scale(), GroupedLinear(E, F, K, **how))


def call(model: Sequential, x: Tensor) -> Tensor:
    y: Tensor = model(x, split_sizes=SIZES, scales=torch.ones(5))
    return y


# ------------------------------------------------------------------------------------------------- on the object


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_patched_fwd_runs_and_declines_the_fusion(index: int) -> None:
    model, x, seen = mlp(), torch.randn(5, K), []
    y, original = call(model, x), model[index].fwd
    model[index].fwd = lambda *args, **kwargs: seen.append(1) or original(*args, **kwargs)

    torch.testing.assert_close(call(model, x), y)
    assert seen == [1]
    role = ("fc1", "act", "scale", "fc2")[index]
    assert f"{role} has a fwd of its own, set on the object" in [f.reason for f in model.explain().fusions]
    del model[index].fwd
    call(model, x)
    assert steps(model) == ["GroupedMLP"]


def test_a_patched_bwd_runs() -> None:
    model, x = mlp(), torch.randn(5, K, requires_grad=True)
    call(model, x).sum().backward()
    original = model[1].bwd
    model[1].bwd = lambda *args: {name: 0 * gradient for name, gradient in original(*args).items()}
    (dx,) = torch.autograd.grad(call(model, x).sum(), x)

    assert x.grad.any()
    assert not dx.any()


def test_a_patched_op_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capture, "find_library", staticmethod(object))
    model, x, scales = Sequential(Scale()), torch.ones(2, K), torch.ones(2)
    with replay.simulated("cpu"):
        model(x, scales=scales)
        assert model.explain().replay == "captured when a call of this form comes again"
        model[0].fwd = model[0].fwd
        model(x, scales=scales)

    assert model.explain().replay == "not replayed: the fwd of op 0 (Scale) is set on the object"


def test_a_patched_op_is_not_compiled() -> None:
    model = Sequential(Linear(K, K))
    model[0].fwd = model[0].fwd
    compiled, x = torch.compile(model, backend="eager"), torch.randn(5, K)

    torch.testing.assert_close(compiled(x), model(x))
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"op 0 \(Linear\): its fwd was set on the object"):
        torch.compile(model, backend="eager", fullgraph=True)(x)


def test_a_composite_that_is_patched_between_calls_is_not_taken_apart() -> None:
    model, x = Sequential(ScaledSwiGLU()), torch.randn(5, K)
    y, original = model(x, scales=torch.ones(5)), model[0].fwd
    model[0].fwd = lambda *args, **kwargs: ((2 * (ran := original(*args, **kwargs))[0]), ran[1])

    torch.testing.assert_close(model(x, scales=torch.ones(5)), 2 * y)


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "between calls"])
def test_a_forward_that_is_set_on_a_nested_container_runs(called: bool) -> None:
    model, x = Sequential(Sequential(Linear(K, K)), Activation("relu")), torch.randn(5, K)
    if called:
        model(x)
    model[0].forward = lambda x: x + 1

    torch.testing.assert_close(model(x), (x + 1).relu())
    del model[0].forward
    torch.testing.assert_close(model(x), model[0][0](x).relu())


def test_decisions_see_edited_attributes() -> None:
    @register_fusion(Pattern.path(linear=Linear, act=Activation).where("not relu", lambda m: m.act.spec.name == "relu"))
    class LinearReLU(FusedOp):
        linear: Linear

        def fwd(self, x: Tensor) -> tuple[Tensor, None]:
            return nn.functional.linear(x, self.linear.weight, self.linear.bias).relu_(), None

        def bwd(self, saved: None, dy: Tensor) -> Grads:
            raise NotImplementedError

    model, x = Sequential(Linear(K, K), Activation("relu")), torch.randn(5, K)
    with torch.no_grad():
        model(x)
        model[1].spec = ActivationSpec("silu")
        y = model(x)

        assert steps(model) == ["Linear", "Activation"]
        torch.testing.assert_close(y, nn.functional.silu(model[0](x)))


# ------------------------------------------------------------------------------------------------- in a subclass


class Doubling(GroupedLinear):
    def forward(self, x: Tensor, **keywords: Any) -> Any:
        return 2 * super().forward(x, **keywords)


class Counting(Activation):
    """Counts its calls, and its backwards."""

    calls = 0

    def fwd(self, x: Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        return super().fwd(x, **kwargs)

    def bwd(self, *args: Any, **kwargs: Any) -> Grads:
        self.calls += 1
        return super().bwd(*args, **kwargs)


def test_an_op_that_counts_its_calls_is_planned_once() -> None:
    model = Sequential(Linear(K, F), Counting("silu"))
    plans = []
    for _ in range(3):
        model(torch.randn(5, K)).sum().backward()
        plans += model._compiled.plans.values()

    assert model[1].calls == 6
    plan = plans[0]
    assert plans == [plan] * 3
    model[1].calls = 0
    model(torch.randn(5, K))
    (again,) = model._compiled.plans.values()
    assert again is not plan


@pytest.mark.parametrize("disabled", [set(), FUSIONS])
def test_a_forward_of_a_subclass_runs(disabled: set[str]) -> None:
    model, x = mlp(Doubling), torch.randn(5, K, requires_grad=True)
    with config(disable_fusions=disabled):
        y = call(model, x)

    hidden = model[1](model[0](x, split_sizes=SIZES))
    torch.testing.assert_close(y, model[3](hidden, split_sizes=SIZES))


def test_a_forward_of_a_subclass_declines_the_fusion() -> None:
    model = mlp(Doubling)
    call(model, torch.randn(5, K))
    found = model.explain()

    assert found.fusions[0].reason == "op 0 has a forward of its own, which only runs where it is called itself"
    assert (found.steps[0].kernel, found.steps[0].reason) == ("?", "it has a forward of its own, which may do anything")


class DoublingForward(ScaledSwiGLU):
    def forward(self, x: Tensor, **keywords: Any) -> Any:
        return 2 * super().forward(x, **keywords)


class DoublingFwd(ScaledSwiGLU):
    def fwd(self, x: Tensor, *, scales: Tensor, needs_grad: frozenset[str], autocast_dtype: Any) -> Any:
        return super().fwd(x, scales=2 * scales, needs_grad=needs_grad, autocast_dtype=autocast_dtype)


@pytest.mark.parametrize("build", [DoublingForward, DoublingFwd])
def test_a_composite_with_code_of_its_own_is_not_taken_apart(build: type[ScaledSwiGLU]) -> None:
    composite, x, scales = build(), torch.randn(5, K), torch.rand(5)
    y = Sequential(composite)(x, scales=scales)

    torch.testing.assert_close(y, 2 * ScaledSwiGLU()(x, scales=scales))
    torch.testing.assert_close(y, composite(x, scales=scales))


# ------------------------------------------------------------------------------------------------- in hooks


def test_a_hook_may_cast_the_input() -> None:
    model, x = mlp(dtype=torch.float64), torch.randn(5, K)
    model[0].register_forward_pre_hook(lambda module, args: (args[0].double(),))

    assert call(model, x).dtype == torch.float64
    assert model.explain().steps[0].name == "GroupedLinear"


def test_a_hook_may_cast_the_output() -> None:
    model, x = mlp(), torch.randn(5, K)
    model[0].register_forward_hook(lambda module, args, y: y.double())
    model[3].double()

    assert call(model, x).dtype == torch.float64


def test_explain_says_where_hooks_hide_what_runs() -> None:
    model = Sequential(Linear(K, K))
    model[0].register_forward_pre_hook(lambda module, args: (args[0].repeat(1, 2),))
    (step,) = model.explain(torch.randn(5, K // 2)).steps

    assert (step.kernel, step.reason) == ("?", "its hooks may change what it is given")


def test_errors_of_a_hooked_op_name_it() -> None:
    model = mlp()
    model[0].register_forward_pre_hook(lambda module, args: (args[0].double(),))

    with pytest.raises(ArgumentError, match=r"^op 0 \(GroupedLinear\): x: expected torch.float32"):
        call(model, torch.randn(5, K))


def one_tensor(module: nn.Module, args: Any, outputs: Any) -> Any:
    return outputs[0]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("returned", [True, False])
def test_a_hook_that_drops_an_extra_output_raises(rows: int, returned: bool) -> None:
    model = Sequential(MakeExtraOutput("r"), *([] if returned else [AddExtraInput("r")]))
    model[0].register_forward_hook(one_tensor)
    for _ in range(3):
        with pytest.raises(
            RuntimeError, match=r"^op 0 \(MakeExtraOutput\): expected its outputs \(y, r\) .* a Tensor; "
        ):
            model(torch.ones(rows, K))


def test_a_hook_that_returns_too_many_outputs_raises() -> None:
    model = Sequential(MakeExtraOutput("r"))
    model[0].register_forward_hook(lambda module, args, outputs: (*outputs, outputs[0]))

    with pytest.raises(RuntimeError, match=r"expected its outputs \(y, r\) as a tuple, got 3 values"):
        model(torch.ones(2, K))


def test_a_forward_of_a_subclass_that_drops_an_extra_output_raises() -> None:
    class First(MakeExtraOutput):
        def forward(self, x: Tensor, **keywords: Any) -> Any:
            return super().forward(x, **keywords)[0]

    with pytest.raises(RuntimeError, match=r"^op 0 \(First\): expected its outputs"):
        Sequential(First("r"))(torch.ones(2, K))


def test_a_hook_that_drops_an_extra_output_raises_in_compiled_code() -> None:
    model = Sequential(MakeExtraOutput("r"), AddExtraInput("r"))
    model[0].register_forward_hook(one_tensor)
    torch.compiler.reset()

    with pytest.raises(RuntimeError, match=r"expected its outputs \(y, r\) as a tuple, got a Tensor"):
        torch.compile(model, backend="eager")(torch.ones(2, K))
    torch.compiler.reset()  # Dynamo keeps the state of the call that raised, and the next compilation would fail


def test_a_hook_may_replace_all_outputs() -> None:
    model, x = Sequential(MakeExtraOutput("r"), AddExtraInput("r")), torch.ones(2, K)
    model[0].register_forward_hook(lambda module, args, outputs: [2 * y for y in outputs])

    torch.testing.assert_close(model(x), 4 * x)
