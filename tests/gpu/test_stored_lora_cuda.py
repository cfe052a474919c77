"""Adapters beside weights in 8 and 4 bits: eager calls, replays, CUDA graphs, checkpoints, odd sizes, padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from checks import stored_lora as checks
from checks.device import needs_hopper
from graph_nodes import captured
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusible import MXFP4, NF4, Float8Weight, Int4, NVFP4Weight
from fusible.fuser import replay
from fusible.ops.formats.recipe import Recipe

pytestmark = [
    pytest.mark.cuda,
    needs_hopper,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node"),
]
each_recipe = pytest.mark.parametrize("recipe", checks.RECIPES, ids=checks.IDS)


@each_recipe
def test_gradients_are_those_of_the_decoded_weights(recipe: Recipe) -> None:
    before = replay.stats().replayed
    checks.check("cuda", recipe, rows=(150, 150, 143, 150, 301))
    assert replay.stats().replayed > before


@pytest.mark.parametrize(
    ("recipe", "experts", "features"),
    [
        *((MXFP4(), 896, 64), (NVFP4Weight(2), 4, 704), (NF4(), 4, 1856), (Float8Weight("rows"), 4, 1856)),
        *((MXFP4(), 4, 2880), (Int4(), 4, 3072), (Float8Weight(), 4, 704)),
    ],
    ids=str,
)
def test_sizes_of_published_experts(recipe: Recipe, experts: int, features: int) -> None:
    checks.check("cuda", recipe, experts, features, rows=(40,))


@each_recipe
def test_a_cuda_graph_has_the_bits_of_the_call(recipe: Recipe) -> None:
    model = checks.layer("cuda", recipe, 5, 256)
    given = checks.Inputs.draw(model, 150)
    graph, results = captured(lambda: checks.step(model, given))
    for seed in (1, 2):
        for old, new in zip(given, checks.Inputs.draw(model, 150, seed), strict=True):
            old.copy_(new)
        graph.replay()
        for found, expected in zip(results, checks.step(model, given), strict=True):
            assert torch.equal(found, expected)


@each_recipe
def test_a_checkpoint_has_the_bits_of_the_call(recipe: Recipe) -> None:
    model = checks.layer("cuda", recipe, 5, 256)
    given = checks.Inputs.draw(model, 150)
    expected = checks.step(model, given)

    def again(x: Tensor, **call: Any) -> Any:
        return checkpoint(partial(model.forward, **call), x, use_reentrant=False)

    for found, true in zip(checks.step(model, given, again), expected, strict=True):
        assert torch.equal(found, true)


@each_recipe
def test_padding_of_any_value_reaches_nothing(recipe: Recipe) -> None:
    """Tokens of no expert, the rows behind the last group, and the memory that results are written to."""
    model = checks.layer("cuda", recipe, 5, 256)
    given = checks.Inputs.draw(model, 150)
    given.ids[::4] = 5  # of no expert, in both slots
    expected = checks.step(model, given)
    for poison in (torch.nan, torch.inf):
        given.x[::4], given.dy[::4] = poison, poison
        spoil_memory(poison)
        found = checks.step(model, given)
        for result, true in zip([*found[:2], *found[3:]], [*expected[:2], *expected[3:]], strict=True):
            assert torch.equal(result, true)
    single(model[1])


def test_products_decode_the_bytes() -> None:
    checks.check_decoded_within("cuda")


def test_no_decoded_weight_is_in_memory() -> None:
    model = checks.layer("cuda", MXFP4(), 8, 2048, 1024)
    given = checks.Inputs.draw(model, 200)
    checks.step(model, given)  # what is made once is there
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    checks.step(model, given)
    decoded = 2 * 2 * model[1].weight.numel()  # bytes of bfloat16, two values for each byte
    assert torch.cuda.max_memory_allocated() - before < decoded


def single(linear: Any) -> None:
    """A linear alone, whose last rows are of no group."""
    x, sizes = torch.randn(70, linear.in_features, device="cuda").bfloat16(), torch.tensor([3, 0, 17, 1, 40])
    dy = torch.randn(70, linear.out_features, device="cuda").bfloat16()
    results = []
    for poison in (0, torch.nan):
        x[61:], dy[61:] = poison, poison
        spoil_memory(torch.nan)
        leaf = x.detach().requires_grad_()
        y = linear(leaf, split_sizes=sizes.cuda())
        trained = [leaf, linear.lora_a, linear.lora_b, linear.bias]
        results.append([y, *torch.autograd.grad(y, trained, dy)])
    for clean, found in zip(*results, strict=True):
        assert torch.equal(clean, found)
    assert not found.isnan().any()
    assert not results[1][0][61:].any()


def spoil_memory(value: float) -> None:
    """Leaves the value in what the allocator hands out next."""
    sizes = [1 << bits for bits in (12, 16, 20, 22)] * 4
    blocks = [torch.full((size,), value, device="cuda") for size in sizes]
    del blocks
