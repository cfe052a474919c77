"""Linears and experts under every recipe on our own kernels, emulated on a CPU, against the definition."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from checks import packed, recipes, stored
from checks.recipes import ALL, DEQUANTISED, MULTIPLIED, WEIGHTS, Kernels, Layers
from emulation import build, harness

import fusible
from fusible.fuser import RefusedError, replay
from fusible.ops.kernels.pytorch import loop, scaled_gemm

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
LAYERS = Layers(3, 144, 160, 90, (60, 0, 23))


@cache
def emulation() -> harness.Emulation:
    """One for all tests, each of which installs it where kernels are to run."""
    return harness.Emulation(build.build())


KERNELS = Kernels("cpu", lambda: harness.installed(emulation()))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("options", WEIGHTS[:1], ids=str)
def test_a_linear_is_close_to_the_definition(name, options):
    recipes.check_linear(KERNELS, LAYERS, name, options)


@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
@pytest.mark.parametrize("options", WEIGHTS[1:], ids=str)
def test_values_of_weights_that_lie_otherwise_are_close_to_the_definition(name, options):
    recipes.check_linear(KERNELS, LAYERS, name, options)


@pytest.mark.parametrize("name", ALL)
def test_experts_are_close_to_the_definition(name):
    recipes.check_experts(KERNELS, LAYERS, name, bias=False)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_leaves_nothing_finite_in_its_row(name, value):
    recipes.check_not_finite(KERNELS, LAYERS, name, value)


@pytest.mark.parametrize("name", ["block", "MXFP8"])
def test_a_routed_layer_is_close_to_the_definition(name):
    recipes.check_routed(KERNELS, LAYERS, name)


@pytest.mark.parametrize("name", [*DEQUANTISED, "NVFP4"])
def test_one_group_of_few_tokens(name):
    """All of its tokens are in one block, whose transpose must not stay a view: kernels do not read one."""
    recipes.check_linear(KERNELS, Layers(1, 144, 160, 33, (33,)), name, {})


@pytest.mark.parametrize("name", MULTIPLIED)
def test_recipes_with_kernels_run_strictly(name):
    recipes.check_strict(KERNELS, LAYERS, name)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_what_is_not_computed_in_its_format_says_so_and_is_refused_when_strict(name):
    recipes.check_refused(KERNELS, LAYERS, name)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_a_graph_captures_what_is_multiplied_in_16_bits(name, monkeypatch):
    """PyTorch's products of the bytes, group by group, are those of a backend that must be asked for by name."""
    with KERNELS.installed():
        call = LAYERS.experts(DEQUANTISED[name]), *LAYERS.call("cpu", LAYERS.features)
        results = recipes.steps(*call, count=1)
        for module in (loop, scaled_gemm):
            monkeypatch.setattr(module, "is_capturing", lambda device: True)
        results += recipes.steps(*call, count=1)
        words = "product of quantised operands has no kernel of loop, because it reads split sizes on the host"
        with fusible.config(backend="loop"), pytest.raises(RefusedError, match=words):
            recipes.steps(*call)

    recipes.assert_same_bits(results)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "single"), [(torch.float32, True), (torch.bfloat16, False)])
def test_main_grads_are_added_to(name, dtype, single):
    recipes.check_main_grads(KERNELS, LAYERS, name, dtype, single)


@pytest.mark.parametrize("name", recipes.STAY_QUANTISED)
def test_quantised_weights_give_the_numbers_of_the_recipe(name):
    recipes.check_quantised_weights(KERNELS, LAYERS, name)


REPLAYED = ["block", "row", "tensor", "MXFP8"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "") for name in REPLAYED),
        ("delayed", "PyTorch advances the scales of steps before"),
        ("MXFP8 fast", "PyTorch quantises for MXFP8"),
        ("NVFP4", "PyTorch makes the factors of groups and the seeds of random numbers"),
    ],
)
def test_calls_are_replayed_where_kernels_quantise_and_else_not_with_a_reason(name, why):
    recipe, before = ALL[name], replay.stats()
    with KERNELS.installed(), replay.simulated("cpu"):
        results = recipes.steps(LAYERS.linear(recipe, bias=False), *LAYERS.call("cpu", LAYERS.hidden))
    after = replay.stats()

    if name not in ("delayed", "NVFP4"):  # whose scales, or random numbers, change from step to step
        recipes.assert_same_bits(results)
    assert (after.replayed > before.replayed) == (name in REPLAYED)
    reasons = after.unsupported - before.unsupported
    assert bool(reasons) == (name not in REPLAYED)
    assert all(why in reason for reason in reasons), reasons


@pytest.mark.parametrize("name", ["block", "tensor"])
def test_weights_that_stay_quantised_are_transposed_in_replays(name):
    with replay.simulated("cpu"):
        recipes.check_replays_of_quantised_weights(KERNELS, LAYERS, name)


@pytest.mark.parametrize("recipe", [fusible.MXFP8(), fusible.MXFP4(), fusible.NVFP4()], ids=str)
def test_few_rows_of_quantised_experts_are_those_of_dequantised_weights(recipe):
    packed.check_experts(KERNELS, recipe, "auto")


def test_many_rows_of_experts_are_those_of_decoded_weights() -> None:
    stored.check_experts(KERNELS, "auto")
