"""Linears and experts under every recipe on a Hopper GPU, against the definition on the host."""

from __future__ import annotations

import pytest
import torch
from checks import recipes
from checks.device import needs_hopper
from checks.recipes import ALL, DEQUANTISED, MULTIPLIED, Kernels, Layers

import fusible

pytestmark = [pytest.mark.cuda, needs_hopper]
LAYERS = Layers(4, 512, 384, 810, (300, 0, 1, 500))
GPU = Kernels("cuda")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("options", recipes.WEIGHTS, ids=str)
def test_a_linear_is_close_to_the_definition(name, options):
    recipes.check_linear(GPU, LAYERS, name, options)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_close_to_the_definition(name, bias):
    recipes.check_experts(GPU, LAYERS, name, bias)


@pytest.mark.parametrize("name", ALL)
def test_a_routed_layer_is_close_to_the_definition(name):
    recipes.check_routed(GPU, LAYERS, name)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_finite_leaves_nothing_finite_in_its_row(name, value):
    recipes.check_not_finite(GPU, LAYERS, name, value)


@pytest.mark.parametrize("name", MULTIPLIED)
def test_recipes_with_kernels_run_strictly(name):
    recipes.check_strict(GPU, LAYERS, name)


@pytest.mark.hopper
@pytest.mark.parametrize("name", DEQUANTISED)
def test_what_is_not_computed_in_its_format_says_so_and_is_refused_when_strict(name):
    recipes.check_refused(GPU, LAYERS, name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_added_to(name, dtype):
    recipes.check_main_grads(GPU, LAYERS, name, dtype, single=True)


@pytest.mark.parametrize("name", recipes.STAY_QUANTISED)
def test_quantised_weights_give_the_numbers_of_the_recipe(name):
    recipes.check_quantised_weights(GPU, LAYERS, name)


def test_products_of_blocks_are_those_of_their_bytes():
    model = LAYERS.linear(fusible.Float8Block()).cuda()
    x, _, sizes = LAYERS.call("cuda", LAYERS.hidden)
    step = fusible.explain(model, x, split_sizes=sizes).steps[0]

    assert step.kernel == "hopper (quantise) + hopper (e4m3)"
    assert step.reason == ""


def test_calls_are_replayed_with_the_same_bits():
    model = LAYERS.linear(fusible.Float8Block(), bias=False).cuda()
    x, dy, sizes = LAYERS.call("cuda", LAYERS.hidden)

    recipes.assert_same_bits(recipes.steps(model, x, dy, sizes))
    assert "not replayed" not in fusible.explain(model, x, split_sizes=sizes).replay


@pytest.mark.hopper
@pytest.mark.parametrize("name", ["block", "tensor"])
def test_weights_that_stay_quantised_are_transposed_in_replays(name):
    recipes.check_replays_of_quantised_weights(GPU, LAYERS, name)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
@pytest.mark.parametrize("name", ALL)
def test_nothing_waits_for_the_device(name):
    """A CUDA graph cannot be captured of what does."""
    model = LAYERS.experts(ALL[name]).cuda()
    x, dy, sizes = LAYERS.call("cuda", LAYERS.features)

    def step():
        y = model(x, split_sizes=sizes)
        return (y, *torch.autograd.grad(y, [x, *model.parameters()], dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(6):  # delayed scales have settled
            expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()

    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
