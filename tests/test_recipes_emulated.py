"""Linears and experts under every recipe on our own kernels, emulated on a CPU, against the definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from emulation import build, harness

import fusible
from fusible.fuser import replay
from fusible.ops.quantized.recipe import Recipe

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
E, K, F, T = 3, 144, 160, 90
SIZES = (60, 0, 23)
MULTIPLIED: dict[str, Recipe] = {  # by our own kernels, as bytes or exactly in 16 bits
    "row": fusible.Float8Row(),
    "row float32": fusible.Float8Row(scales="float32"),
    "row fast": fusible.Float8Row(fast_accumulation=True),
    "tensor": fusible.Float8Tensor(),
    "tensor bfloat16 wgrad": fusible.Float8Tensor(wgrad="bfloat16"),
    "delayed": fusible.Float8Tensor(delayed=fusible.Delayed(history=2)),
    "MXFP8 fast": fusible.MXFP8(compute="fast"),
    "MXFP8": fusible.MXFP8(),
    "NVFP4": fusible.NVFP4(stochastic_rounding=False),
}
DEQUANTISED: dict[str, Recipe] = {
    "row e5m2": fusible.Float8Row(gradient="e5m2"),
    "block e5m2": fusible.Float8Block(gradient="e5m2"),
    "tensor e5m2": fusible.Float8Tensor(gradient="e5m2"),
}
ALL = MULTIPLIED | DEQUANTISED


@contextmanager
def emulated() -> Iterator[None]:
    with harness.installed(harness.Emulation(build.build())):
        yield


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(recipe, **options):
    torch.manual_seed(1)
    return fusible.GroupedLinear(E, K, F, dtype=torch.bfloat16, recipe=recipe, **options)


def experts(recipe, **options):
    torch.manual_seed(1)
    options = {"bias": False, "dtype": torch.bfloat16, "recipe": recipe, **options}
    first, second = fusible.GroupedLinear(E, K, 2 * F, **options), fusible.GroupedLinear(E, F, K, **options)
    return fusible.Sequential(first, fusible.SwiGLU(), second)


def run(model):
    x = tensor(T, K).requires_grad_()
    y = model(x, split_sizes=torch.tensor(SIZES))
    y.backward(tensor(T, y.shape[1], seed=2))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def assert_close(ours, theirs, bound):
    assert ours.keys() == theirs.keys()
    for name in ours:
        apart = (ours[name].float() - theirs[name].float()).norm() / theirs[name].float().norm()
        assert apart < bound, (name, float(apart))


@pytest.mark.parametrize("name", ALL)
def test_a_linear_is_close_to_the_definition(name):
    expected = run(linear(ALL[name]))
    with emulated(), fusible.config(strict=name in MULTIPLIED):
        ours = run(linear(ALL[name]))

    assert_close(ours, expected, 4e-3)
    assert not ours["y"][83:].any()
    assert not ours["x"][83:].any()


@pytest.mark.parametrize("name", ALL)
def test_experts_are_close_to_the_definition(name):
    """What an activation rounds otherwise is quantised to another byte now and then."""
    expected = run(experts(ALL[name]))
    with emulated():
        ours = run(experts(ALL[name]))

    assert_close(ours, expected, 0.08 if name == "NVFP4" else 0.04 if "e5m2" in name else 0.02)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_what_is_not_computed_in_its_format_says_so_and_is_refused_when_strict(name):
    with emulated():
        op, sizes, x = linear(DEQUANTISED[name]), torch.tensor(SIZES), tensor(T, K).requires_grad_()
        explanation = str(fusible.explain(op, x, split_sizes=sizes))
        with fusible.config(strict=True), pytest.raises(fusible.RefusedError, match="e4m3fn operands"):
            run(op)

    assert "multiplied in 16 bits: hopper" in explanation


@pytest.mark.parametrize("recipe", [fusible.Float8Block(), *ALL.values()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("single", [True, False])
def test_main_grads_are_added_to(recipe, dtype, single):
    expected = run(linear(recipe, bias=False))["weight"].float()
    with emulated():
        op = linear(recipe, bias=False, accumulate_into_main_grad=True, single_grouped_weight=single)
        for parameter in op.parameters():
            parameter.main_grad = torch.ones_like(parameter, dtype=dtype)
        op(tensor(T, K).requires_grad_(), split_sizes=torch.tensor(SIZES)).backward(tensor(T, F, seed=2))
        grads = [parameter.main_grad.float() for parameter in op.parameters()]

    assert_close({"w": grads[0] if single else torch.stack(grads)}, {"w": 1 + expected}, 5e-3)


@pytest.mark.parametrize("name", [name for name in ALL if name != "delayed"])
def test_quantised_weights_give_the_numbers_of_the_recipe(name):
    with emulated(), torch.no_grad():
        model, x, sizes = experts(ALL[name], single_grouped_weight=False), tensor(T, K), torch.tensor(SIZES)
        expected = model(x, split_sizes=sizes)
        y = fusible.quantize_(model, ALL[name])(x, split_sizes=sizes)

    assert torch.equal(y, expected)


@pytest.mark.parametrize("recipe", [fusible.Float8Block(), fusible.Float8Row(), fusible.MXFP8()], ids=str)
def test_calls_are_replayed_where_kernels_quantise_and_else_not_with_a_reason(recipe):
    with emulated(), replay.simulated("cpu"):
        op, x, dy = linear(recipe, bias=False), tensor(T, K), tensor(T, F, seed=2)
        sizes, before, results = torch.tensor(SIZES), replay.stats(), []
        for _ in range(4):
            op.zero_grad()
            leaf = x.clone().requires_grad_()
            y = op(leaf, split_sizes=sizes)
            y.backward(dy)
            results.append((y.detach(), leaf.grad, op.weight.grad))
    after = replay.stats()

    assert all(torch.equal(a, b) for later in results[1:] for a, b in zip(results[0], later, strict=True))
    assert (after.replayed > before.replayed) == isinstance(recipe, fusible.Float8Block)
    reasons = after.unsupported - before.unsupported
    assert bool(reasons) != isinstance(recipe, fusible.Float8Block)
    assert all(f"PyTorch quantises for {type(recipe).__name__}" in reason for reason in reasons), reasons
