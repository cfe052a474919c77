"""Fusions: who takes which ops, what a plugin may do, and why a fusion does not fire."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from models import mlp, steps
from torch import Tensor, nn

from fusible import (
    AddExtraInput,
    ArgumentError,
    Bias,
    Composite,
    ConstantScale,
    FusedOp,
    GroupedLinear,
    Identity,
    MakeExtraOutput,
    Pattern,
    RefusedError,
    Scale,
    Sequential,
    SwiGLU,
    config,
    explain,
    optional,
    register_fusion,
    unregister,
)
from fusible.fuser import Fusion, registry
from fusible.fuser.compiler import registry as fusion
from fusible.fuser.compiler.registry import Registry

X = torch.ones(3, 4)
SIZES = torch.tensor([2, 1])
PAIR = Pattern.path(a=ConstantScale, b=ConstantScale)


class Product(FusedOp):
    """Two constant scales, the second possibly missing."""

    def fwd(self, x: Tensor):
        return x * self.factor, None

    def bwd(self, saved, dy: Tensor):
        return {"x": lambda: dy * self.factor}

    @property
    def factor(self):
        return self.a.scale * (self.b.scale if self.b else 1.0)


class Other(Product): ...


@pytest.fixture(autouse=True)
def _without_chains():
    """Which would take the ops that the fusions of these tests leave."""
    unregister("PointwiseChain")


def pair():
    return Sequential(ConstantScale(2.0), ConstantScale(3.0))


def reasons(model, *args, **kwargs):
    """By fusion, why its first match was not taken; None if it was."""
    found = {}
    for f in model.explain(*args, **kwargs).fusions:
        found.setdefault(f.name, None if f.taken else f.reason)
    return found


def outcome(model, x, **keywords):
    """The outputs and every gradient of a call."""
    x = x.clone().requires_grad_()
    y = model(x, **keywords)
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    return [*(y if isinstance(y, tuple) else (y,)), x.grad, *[p.grad for p in model.parameters()]]


# ------------------------------------------------------------------------------------------------- the registry


def test_fusion_registered_after_a_run_fires_at_the_next_call():
    model = pair()
    model(X)
    assert steps(model) == ["ConstantScale", "ConstantScale"]
    register_fusion(PAIR)(Product)

    assert torch.equal(model(X), 6 * X)
    assert steps(model) == ["Product"]


@pytest.mark.parametrize("handle", ["Product", Product])
def test_unregistered_fusion_fires_no_more(handle):
    register_fusion(PAIR)(Product)
    model = pair()
    model(X)
    unregister(handle)
    model(X)

    assert steps(model) == ["ConstantScale", "ConstantScale"]


def test_decorator_returns_the_class():
    assert register_fusion(PAIR)(Product) is Product


def test_fusion_may_have_a_name_of_its_own():
    register_fusion(PAIR, name="mine")(Product)

    assert reasons(pair(), X) == {"mine": None}


def test_name_that_is_taken_raises():
    register_fusion(PAIR)(Product)

    with pytest.raises(ValueError, match="a fusion named 'Product' is registered already; give another name"):
        register_fusion(PAIR)(Product)


def test_half_a_fusion_without_the_residuals_of_its_parts_is_named():
    class OnlyForward(FusedOp):
        def fwd(self, x: Tensor):
            return x * 6, None

    register_fusion(PAIR)(OnlyForward)
    y = pair()(X.clone().requires_grad_())

    with pytest.raises(
        RuntimeError, match=r"OnlyForward has the bwd of its parts, .* a dictionary of a, b; .* none of b"
    ):
        y.sum().backward()


def test_fusion_whose_keyword_no_op_was_given_declines():
    class Needy(Product):
        def fwd(self, x: Tensor, *, scales: Tensor):
            return x * scales, None

    register_fusion(PAIR)(Needy)
    model = pair()

    assert torch.equal(model(X), 6 * X)
    assert reasons(model)["Needy"] == "Needy needs 'scales', which no op that it stands for was given"


@pytest.mark.parametrize("where", ["predicate", "constructor"])
def test_an_error_of_a_plugin_names_the_fusion(where: str):
    class Broken(Product):
        def __init__(self, **roles):
            super().__init__(**roles)
            raise ValueError(where)

    def refuses(match):
        raise ValueError(where)

    register_fusion(PAIR.where("it works", refuses) if where == "predicate" else PAIR)(Broken)

    with pytest.raises(ValueError, match=where) as raised:
        pair()(X)
    assert raised.value.__notes__ == ["while fusion Broken was tried; config(disable_fusions={'Broken'}) skips it"]


def test_unregistering_what_is_not_there_raises():
    there = ", ".join(f.name for f in registry)
    assert there.endswith("GroupedLinearResidual, GroupedLinearGLU, GroupedLinearChain, GLUScale")
    with pytest.raises(KeyError, match=f"no fusion is named 'Product'; there are {there}"):
        unregister("Product")
    with pytest.raises(TypeError, match="unregister: expected the name of a fusion, or its class, got 3"):
        unregister(3)


@pytest.mark.parametrize(("priority", "taken"), [(-1, "Product"), (0, "Product"), (1, "Other")])
def test_higher_priority_is_tried_first_then_who_came_first(priority, taken):
    register_fusion(PAIR)(Product)
    register_fusion(PAIR, priority=priority)(Other)

    assert steps(pair(), X) == [taken]


def test_op_that_is_taken_is_not_taken_again():
    register_fusion(PAIR)(Product)
    model = Sequential(*[ConstantScale(2.0) for _ in range(5)])

    assert torch.equal(model(X), 32 * X)
    assert steps(model) == ["Product", "Product", "ConstantScale"]
    assert [f.reason for f in model.explain().fusions if not f.taken] == ["Product has taken one of the ops"] * 2


# ------------------------------------------------------------------------------------------------- plugins


class EntryPoint(NamedTuple):
    name: str
    value: str
    load: object


def found(monkeypatch, *points):
    monkeypatch.setattr(fusion, "entry_points", lambda group: points if group == "fusible.fusions" else ())
    return Registry()


def test_plugins_are_found_through_entry_points(monkeypatch):
    plugins = found(monkeypatch, EntryPoint("p", "m", lambda: plugins.add(Fusion("p", PAIR, Product, 0))))

    assert [f.name for f in plugins] == ["p"]


def test_plugins_are_loaded_once(monkeypatch):
    loads = []
    plugins = found(monkeypatch, EntryPoint("p", "m", lambda: loads.append(1)))
    list(plugins)
    list(plugins)

    assert loads == [1]


def test_plugin_is_seen_by_the_first_call(monkeypatch):
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    load = EntryPoint("p", "m", lambda: register_fusion(PAIR)(Product))
    monkeypatch.setattr(fusion, "entry_points", lambda group: [load])

    assert steps(pair(), X) == ["Product"]


def test_broken_plugin_warns_and_the_others_load(monkeypatch):
    good = EntryPoint("good", "m:g", lambda: plugins.add(Fusion("good", PAIR, Product, 0)))
    plugins = found(monkeypatch, EntryPoint("bad", "m:b", lambda: 1 / 0), good)
    with pytest.warns(UserWarning, match=r"plugin 'bad' \(m:b\) failed to load: ZeroDivisionError"):
        names = [f.name for f in plugins]

    assert names == ["good"]


# ------------------------------------------------------------------------------------------------- refusals


def test_disabled_fusion_does_not_fire_and_says_so():
    model, x = mlp(), torch.randn(3, 4)
    y = model(x, split_sizes=SIZES, scales=torch.ones(3))
    with config(disable_fusions={"GroupedMLP"}):
        torch.testing.assert_close(model(x, split_sizes=SIZES, scales=torch.ones(3)), y)

        assert steps(model) == ["GroupedLinearGLU", "GroupedLinear"]
        assert reasons(model)["GroupedMLP"] == "disabled by config(disable_fusions=...)"


def test_name_of_no_fusion_is_warned_of():
    words = "no fusion GroupedMPL; there are .*; did you mean 'GroupedMLP'"
    with config(disable_fusions={"GroupedMPL"}), pytest.warns(UserWarning, match=words):
        mlp()(torch.randn(3, 4), split_sizes=SIZES, scales=torch.ones(3))


def test_one_string_of_disabled_fusions_raises():
    with pytest.raises(ValueError, match=r"such as \{'GroupedMLP'\}"), config(disable_fusions="GroupedMLP"):
        pass
    with pytest.raises(ValueError, match=r"such as \{'GroupedMLP'\}, got 1"), config(disable_fusions={1}):
        pass


@pytest.mark.parametrize("switch", ["strict", "debug", "recompute"])
def test_a_switch_is_true_or_false(switch: str) -> None:
    with pytest.raises(ValueError, match=f"config: {switch} must be True or False, got 'no'"), config(**{switch: "no"}):
        pass


def test_unknown_backend_raises():
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*, got 'cuda'"), config(backend="cuda"):
        pass


def test_condition_that_fails_is_the_reason():
    model, one, other = mlp(), SIZES, SIZES.clone()

    assert reasons(model, X, one, torch.ones(3), other)["GroupedMLP"] == "fc1 and fc2 read different split_sizes"


def test_strict_raises_the_reason_and_runs_nothing():
    model = mlp()
    buffer = torch.full((3, 8), 7.0)
    with config(strict=True), pytest.raises(RefusedError, match="GroupedMLP over 0 1 2 3: fc1 has 'output'"):
        model(X, split_sizes=SIZES, scales=torch.ones(3), op_kwargs={0: {"output": buffer}})

    assert torch.equal(buffer, torch.full((3, 8), 7.0))


def test_strict_raises_in_explain_too():
    with config(strict=True), pytest.raises(RefusedError, match="read different split_sizes"):
        mlp().explain(X, SIZES, torch.ones(3), SIZES.clone())


@pytest.mark.parametrize("disabled", [set(), {"GroupedMLP"}])
def test_strict_minds_neither_what_is_disabled_nor_what_another_took(disabled):
    with config(strict=True, disable_fusions=disabled):
        assert mlp()(X, split_sizes=SIZES, scales=torch.ones(3)).shape == (3, 4)


def test_keyword_that_the_fused_op_does_not_take_refuses():
    @register_fusion(Pattern.path(a=AddExtraInput, b=ConstantScale))
    class Blind(Product): ...

    assert reasons(Sequential(AddExtraInput("r"), ConstantScale(2.0)), X, X)["Blind"] == (
        "a has 'r', which Blind does not take"
    )


class Scales(FusedOp):
    """Takes one ``scales`` for both of its parts."""

    def fwd(self, x, *, scales: Tensor):
        return x * scales.unsqueeze(-1) ** 2, scales

    def bwd(self, saved, dy): ...


@pytest.mark.parametrize("same", [True, False])
def test_keyword_of_two_parts_must_be_one_tensor(same):
    register_fusion(Pattern.path(a=Scale, b=Scale))(Scales)
    one = torch.full((3,), 2.0)
    model, other = Sequential(Scale(), Scale()), one if same else one.clone()

    assert torch.equal(model(X, one, other), 4 * X)
    assert reasons(model)["Scales"] == (None if same else "a and b read different scales")


def test_gradients_of_a_keyword_that_two_parts_share_add_up():
    @register_fusion(Pattern.path(a=Scale, b=Scale).shares("scales", "a", "b"))
    class Squared(FusedOp):
        def fwd(self, x, *, scales, needs_grad, autocast_dtype):
            return super().fwd(x, scales=scales, needs_grad=needs_grad, autocast_dtype=autocast_dtype)

    model, scales = Sequential(Scale(), Scale()), torch.tensor([2.0, 3.0, 5.0], requires_grad=True)
    model(X, scales=scales).sum().backward()

    assert steps(model) == ["Squared"]
    assert torch.equal(scales.grad, 2 * 4 * scales)


def test_module_in_between_ends_a_fusible_run():
    register_fusion(PAIR)(Product)

    assert reasons(Sequential(ConstantScale(2.0), nn.Identity(), ConstantScale(3.0)), X) == {}


def test_refused_fusion_leaves_the_ops_to_a_later_one():
    register_fusion(PAIR.where("no", lambda m: False), priority=1)(Product)
    register_fusion(PAIR)(Other)
    model = pair()

    assert steps(model, X) == ["Other"]
    assert reasons(model, X) == {"Product": "no", "Other": None}


def test_subclass_of_an_op_is_not_replaced_by_its_base():
    class Doubled(GroupedLinear):
        def fwd(self, x, **keywords):
            y, saved = super().fwd(x, **keywords)
            return 2 * y, saved

    model, x = Sequential(GroupedLinear(2, 4, 8), SwiGLU(), Doubled(2, 4, 4)), torch.randn(3, 4)
    y = model(x, split_sizes=SIZES)
    with config(disable_fusions={"GroupedMLP", "GroupedLinearGLU"}):
        torch.testing.assert_close(y, model(x, split_sizes=SIZES))

    assert reasons(model, x, SIZES, SIZES)["GroupedMLP"] == "fc2 is a Doubled, which overrides GroupedLinear"


# ------------------------------------------------------------------------------------------------- fused ops at work


def test_optional_role_is_none_where_missing():
    register_fusion(Pattern.path(a=ConstantScale, b=optional(ConstantScale)))(Product)

    assert torch.equal(Sequential(ConstantScale(5.0), Identity())(X), 5 * X)


class ResidualForward(FusedOp):
    """``x * factor + x + bias``: the forward alone."""

    def fwd(self, x: Tensor):
        return x * (self.act.scale + 1) + self.bias.bias, dict.fromkeys(self.parts)


class ResidualBackward(FusedOp):
    """The backward alone."""

    def bwd(self, saved, dy: Tensor):
        return {"x": dy * (self.act.scale + 1), "bias.bias": dy.sum(0)}


RESIDUAL = Pattern.path(make=MakeExtraOutput, act=ConstantScale, add=AddExtraInput, bias=Bias).edge("make", "add", "r")


def residual():
    return Sequential(MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r"), Bias(4))


@pytest.mark.parametrize("fused", [ResidualForward, ResidualBackward])
def test_half_defined_fusion_across_a_branch_gives_the_same(fused):
    model, x = residual(), torch.randn(3, 4)
    expected = outcome(model, x)
    model.zero_grad()
    register_fusion(RESIDUAL)(fused)
    got = outcome(model, x)

    assert steps(model) == [fused.__name__]
    torch.testing.assert_close(got, expected)


class KeepsExtra(FusedOp):
    """``MakeExtraOutput``, then ``ConstantScale``; gives the extra output out."""

    extra_outputs = ("r",)

    def fwd(self, x: Tensor):
        return {"y": x * self.act.scale, "r": x.clone()}, None

    def bwd(self, saved, dy: Tensor, *, r: Tensor):
        return {"x": dy * self.act.scale + r}


@pytest.mark.parametrize("tail", [[], [AddExtraInput("r")]], ids=["returned", "read"])
def test_fused_op_may_have_extra_outputs(tail):
    model, x = Sequential(MakeExtraOutput("r"), ConstantScale(2.0), *tail), torch.randn(3, 4)
    expected = outcome(model, x)
    register_fusion(Pattern.path(make=MakeExtraOutput, act=ConstantScale))(KeepsExtra)
    got = outcome(model, x)

    assert steps(model)[0] == "KeepsExtra"
    torch.testing.assert_close(got, expected)


def test_fused_op_reads_what_an_earlier_op_makes():
    register_fusion(Pattern.path(a=Identity, b=AddExtraInput))(ReadsR)
    model, x = Sequential(MakeExtraOutput("r"), ConstantScale(2.0), Identity(), AddExtraInput("r")), torch.randn(3, 4)

    torch.testing.assert_close(outcome(model, x), [3 * x, torch.full_like(x, 3)])
    assert steps(model) == ["MakeExtraOutput", "ConstantScale", "ReadsR"]


class ReadsR(FusedOp):
    def fwd(self, x: Tensor, *, r: Tensor):
        return x + r, None

    def bwd(self, saved, dy):
        return {"x": dy, "r": dy}


def test_part_that_returns_no_gradient_is_named():
    class Forgets(Identity):
        def bwd(self, saved, dy):
            return {}

    class Half(FusedOp):
        def fwd(self, x):
            return x * 1, {"a": None, "b": None}

    register_fusion(Pattern.path(a=Forgets, b=Identity))(Half)
    y = Sequential(Forgets(), Identity())(X.clone().requires_grad_())

    with pytest.raises(RuntimeError, match=r"Forgets\.bwd returned no gradient for \['x'\]"):
        y.sum().backward()


def test_composite_alone_gives_what_its_parts_give():
    model, x = residual(), torch.randn(3, 4)
    composite = Composite(make=model[0], act=model[1], add=model[2], bias=model[3])
    expected = outcome(model, x)
    model.zero_grad()

    torch.testing.assert_close(outcome(composite, x), expected)


def test_composite_alone_checks_its_parts():
    with pytest.raises(ArgumentError, match=r"Composite: scales: expected shape \[3\]"):
        Composite(a=Identity(), b=Scale())(X, scales=torch.ones(2))


def test_composite_alone_behind_an_unknown_shape_is_not_checked():
    class Halved(Identity):
        def check(self, x): ...

        def fwd(self, x):
            return x[:2], None

    assert Composite(a=Halved(), b=Scale())(X, scales=torch.ones(2)).shape == (2, 4)


def test_composite_alone_gives_out_the_extra_outputs_that_no_part_reads():
    y, r = Composite(make=MakeExtraOutput("r"), act=ConstantScale(2.0))(X)

    assert torch.equal(y, 2 * X)
    assert torch.equal(r, X)


def test_explain_of_an_op_alone_and_of_what_is_neither():
    assert explain(ConstantScale(2.0), X).steps[0].name == "ConstantScale"
    with pytest.raises(ArgumentError, match=r"expected a fusible\.Sequential or an Op, got a ReLU"):
        explain(nn.ReLU(), X)


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda: register_fusion(FusedOp), r"expected a Pattern, got .*FusedOp.*; write @register_fusion\(Pattern"),
        (lambda: register_fusion(Pattern.path(a=Identity))(Identity), "expected a subclass of FusedOp, got .*Identity"),
        (lambda: Pattern.path(a=nn.ReLU), "a must be a class of Op, or a tuple of such, got .*ReLU"),
        (lambda: Pattern.path(a=optional((Identity, nn.ReLU))), "a must be a class of Op"),
    ],
)
def test_what_is_no_fusion_is_refused_when_it_is_registered(register, message):
    with pytest.raises(TypeError, match=message):
        register()


def test_a_pattern_has_roles():
    with pytest.raises(ValueError, match="give at least one role"):
        Pattern.path()
