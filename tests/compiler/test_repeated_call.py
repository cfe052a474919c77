"""Calls like the last one, on the host: they run its plan at once, and whatever differs is noticed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fusible import ArgumentError, GroupedLinear, Scale, Sequential, SwiGLU, config
from fusible.fuser.container import call_cache
from fusible.fuser.container.repeated_call import RepeatedCall
from fusible.ops.values import checks

E, K, F, SIZES = 2, 8, 8, torch.tensor([3, 1])


@pytest.fixture
def bound(monkeypatch):
    """Grows by one whenever a call is bound: none that is repeated is."""
    calls, bind = [], call_cache.bind
    monkeypatch.setattr(call_cache, "bind", lambda *args: calls.append(1) or bind(*args))
    return calls


def experts(**options):
    fc1, fc2 = (GroupedLinear(E, K, n, **options) for n in (2 * F, K))
    return Sequential(fc1, SwiGLU(), Scale(), fc2)


def arguments(rows=4):
    return {"x": torch.randn(rows, K), "split_sizes": SIZES, "scales": torch.rand(rows)}


def warm(model, call):
    """The model, whose next call like this one is repeated."""
    for _ in range(2):
        model(**call)
    assert isinstance(model._compiled.repeated, RepeatedCall)
    return model


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_calls_like_the_last_one_are_not_bound(bound, grad, single):
    model, call = experts(single_grouped_weight=single), arguments()
    with torch.set_grad_enabled(grad):
        first, *others = [model(**call) for _ in range(5)]

    assert len(bound) == 2
    assert all(torch.equal(first, y) and y.requires_grad is grad for y in others)


def test_other_values_count(bound):
    model = warm(experts(), arguments())
    call = arguments() | {"split_sizes": torch.tensor([0, 2])}
    y, expected = model(**call), copy.deepcopy(model)(**call)

    assert len(bound) == 3  # the copy's
    assert torch.equal(y, expected)


def test_positions_and_the_order_of_keywords(bound):
    model, call = experts(), arguments()
    y = warm(model, call)(**call)
    before = len(bound)
    others = [
        model(call["x"], SIZES, call["scales"], SIZES),
        model(call["x"], scales=call["scales"], split_sizes=SIZES),
    ]

    assert len(bound) == before + 2
    assert all(torch.equal(y, other) for other in others)


CHANGES = {
    "rows": lambda model, call: call.update(arguments(5)),
    "a dtype": lambda model, call: call.update(split_sizes=SIZES.int()),
    "a list": lambda model, call: call.update(split_sizes=[3, 1]),
    "a gradient": lambda model, call: call["x"].requires_grad_(),
    "one that is not wanted": lambda model, call: model[3].weight.requires_grad_(False),
    "a hook": lambda model, call: model[1].register_forward_hook(lambda *args: None),
    "a patched forward": lambda model, call: setattr(model[1], "forward", model[1].forward),
    "an attribute": lambda model, call: setattr(model[3], "transposed_weight", model[3].transposed_weight),
    "a parameter": lambda model, call: setattr(model[3], "bias", nn.Parameter(torch.zeros(E, K))),
    "an op": lambda model, call: model.__setitem__(1, SwiGLU()),
    "a parametrization": lambda model, call: nn.utils.parametrize.register_parametrization(model[3], "bias", nn.ReLU()),
    "a strided x": lambda model, call: call.update(x=torch.randn(K, 4).mT),
    "a subclass": lambda model, call: call.update(scales=nn.Parameter(call["scales"])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(bound, change):
    model, call = experts(), arguments()
    warm(model, call)
    before = len(bound)
    CHANGES[change](model, call)
    y = model(**call)

    assert len(bound) == before + 1
    assert torch.equal(y, copy.deepcopy(model)(**call))


@pytest.mark.parametrize(
    "switch",
    [lambda: config(disable_fusions={"GroupedMLP"}), torch.no_grad, torch.inference_mode]
    + [lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["a fusion", "no_grad", "inference_mode", "autocast"],
)
def test_switches_are_noticed(bound, switch):
    model, call = experts(), arguments()
    warm(model, call)
    before = len(bound)
    with switch():
        y = model(**call)
        assert len(bound) == before + 1
        assert torch.equal(y, copy.deepcopy(model)(**call))


@pytest.fixture
def two_scales():
    """A container that reads two tensors of one form, called before, and its arguments."""
    model = Sequential(GroupedLinear(E, K, K, scale_bias=True), Scale())
    call = {"x": torch.randn(4, K), "split_sizes": SIZES, "bias_scale": torch.rand(4), "scales": torch.rand(4)}
    return warm(model, call), call


def test_another_order_of_keywords_is_noticed(two_scales):
    model, call = two_scales
    y = model(**call)
    call["bias_scale"] = call.pop("bias_scale")

    assert torch.equal(model(**call), y)


def test_keywords_in_another_order_than_the_ops(bound):
    model, call = experts(), arguments()
    call["split_sizes"] = call.pop("split_sizes")
    y = warm(model, call)(**call)

    assert len(bound) == 2
    assert torch.equal(y, copy.deepcopy(model)(**call))


def test_one_tensor_for_two_keywords_is_noticed(two_scales, bound):
    model, call = two_scales
    model(**call | {"bias_scale": call["scales"]})

    assert len(bound) == 1


def test_values_are_checked_at_each_call():
    model, call = experts(), arguments()
    warm(model, call)
    with pytest.raises(ArgumentError, match="they sum to 9"):
        model(**call | {"split_sizes": torch.tensor([8, 1])})


def test_explain_tells_of_the_repeated_call():
    model, call, other = experts(), arguments(), arguments(6)
    warm(model, call)
    sizes = {"split_sizes": SIZES}
    model(other["x"], op_kwargs={0: sizes, 2: {"scales": other["scales"]}, 3: sizes})
    assert "6x8" in str(model.explain())
    model(**call)

    assert "4x8" in str(model.explain())


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sizes", [[4, 1], [-1, 2], [2**62, 2**62]], ids=str)
def test_wrong_values_are_refused(sizes, grad):
    with torch.set_grad_enabled(grad):
        call = arguments()
        model = warm(experts(), call)
        model(**call)
        with pytest.raises(ArgumentError, match=r"op 0 .*split_sizes: "):
            model(**call | {"split_sizes": torch.tensor(sizes)})


def test_values_alone_are_checked_again(monkeypatch):
    call, checked = arguments(), []
    model = warm(experts(), call)
    monkeypatch.setattr(SwiGLU, "check", lambda *_: checked.append("form"))
    monkeypatch.setattr(checks.SplitSizesFit, "__call__", lambda *_: checked.append("values") or True)
    model(**call)

    assert checked == ["values"]  # of both linears, which read the same


class OwnCheck(GroupedLinear):
    """Looks at values that the check of its base knows nothing of."""

    replayable, values_checked_on_host = True, frozenset({"split_sizes"})

    def check(self, x, *, split_sizes, autocast_dtype=None):
        if int(split_sizes[0]) == 0:
            raise ArgumentError("split_sizes: the first group must have rows")
        return super().check(x, split_sizes=split_sizes, autocast_dtype=autocast_dtype)


def test_a_check_of_another_class_is_asked_each_time():
    model = Sequential(OwnCheck(E, K, K))
    call = {"x": torch.randn(4, K), "split_sizes": SIZES}
    for _ in range(3):
        model(**call)

    with pytest.raises(ArgumentError, match="the first group must have rows"):
        model(**call | {"split_sizes": torch.tensor([0, 2])})


@pytest.mark.parametrize("grad", [False, True])
def test_transforms_are_refused(grad):
    with torch.set_grad_enabled(grad):
        call = arguments()
        model = warm(experts(), call)
        with pytest.raises(RuntimeError, match="transforms and vmap are not supported"):
            torch.func.vmap(lambda _: model(**call))(torch.randn(3))


def test_profiles_name_the_step():
    call = arguments()
    model = warm(experts(), call)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(**call)

    assert "fusible::GroupedMLP" in {event.key for event in profile.key_averages()}
