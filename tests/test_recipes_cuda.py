"""Linears and experts under every recipe on a Hopper GPU, against the definition on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from checks.device import needs_hopper

import fusible
from fusible.ops.quantized.recipe import Recipe

pytestmark = [pytest.mark.cuda, needs_hopper]
E, H, F = 4, 512, 384
SIZES = (300, 0, 1, 500)
RECIPES: dict[str, Recipe] = {
    "block e5m2": fusible.Float8Block(gradient="e5m2"),
    "row": fusible.Float8Row(),
    "row float32": fusible.Float8Row(scales="float32"),
    "row fast": fusible.Float8Row(fast_accumulation=True),
    "row e5m2": fusible.Float8Row(gradient="e5m2"),
    "row bfloat16 wgrad": fusible.Float8Row(wgrad="bfloat16"),
    "tensor": fusible.Float8Tensor(),
    "tensor e5m2": fusible.Float8Tensor(gradient="e5m2"),
    "delayed": fusible.Float8Tensor(delayed=fusible.Delayed(history=4)),
    "MXFP8": fusible.MXFP8(),
    "MXFP8 fast": fusible.MXFP8(compute="fast"),
    "NVFP4": fusible.NVFP4(stochastic_rounding=False),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(recipe, **options):
    torch.manual_seed(1)
    return fusible.GroupedLinear(E, H, F, **{"dtype": torch.bfloat16, "recipe": recipe, **options})


def experts(recipe, **options):
    torch.manual_seed(1)
    options = {"bias": False, "dtype": torch.bfloat16, "recipe": recipe, **options}
    first, second = fusible.GroupedLinear(E, H, 2 * F, **options), fusible.GroupedLinear(E, F, H, **options)
    return fusible.Sequential(first, fusible.SwiGLU(), second)


def routed(recipe):
    first, act, second = experts(recipe)
    return fusible.Sequential(fusible.Dispatch(E), first, act, second, fusible.Scale(), fusible.Combine())


def run(model, device, x, dy, **keywords):
    model = copy.deepcopy(model).to(device)
    x = x.to(device).requires_grad_()
    y = model(x, **{name: value.to(device) for name, value in keywords.items()})
    y.backward(dy.to(device))
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach().cpu(), "x": x.grad.cpu(), **grads}


def bound_of(recipe):
    """An activation that is rounded otherwise becomes another byte now and then."""
    if isinstance(recipe, fusible.NVFP4):
        return 0.08
    return 0.04 if getattr(recipe, "gradient", "") == "e5m2" else 0.02


def assert_close(ours, theirs, bound):
    assert ours.keys() == theirs.keys()
    for name in ours:
        far, size = (ours[name].float() - theirs[name].float()).norm(), theirs[name].float().norm()
        assert far <= bound * size, (name, float(far), float(size))


@each_recipe
@pytest.mark.parametrize("options", [{}, {"transposed_weight": True}, {"single_grouped_weight": False}])
def test_a_linear_is_close_to_the_definition(recipe, options):
    x, dy, sizes = tensor(810, H), tensor(810, F, seed=2), torch.tensor(SIZES)
    model = linear(recipe, **options)

    assert_close(*(run(model, device, x, dy, split_sizes=sizes) for device in ("cuda", "cpu")), 4e-3)


@each_recipe
def test_experts_are_close_to_the_definition(recipe):
    x, dy, sizes = tensor(810, H), tensor(810, H, seed=2), torch.tensor(SIZES)
    bound = bound_of(recipe)

    assert_close(*(run(experts(recipe), device, x, dy, split_sizes=sizes) for device in ("cuda", "cpu")), bound)


@each_recipe
def test_a_routed_layer_is_close_to_the_definition(recipe):
    x, dy = tensor(600, H), tensor(600, H, seed=2)
    ids = torch.randint(0, E, (600, 2), generator=torch.Generator().manual_seed(3))
    routing = {"top_k_index": ids, "top_k_weights": tensor(600, 2, seed=4).float().abs()}
    bound = bound_of(recipe)

    assert_close(*(run(routed(recipe), device, x, dy, **routing) for device in ("cuda", "cpu")), bound)


@pytest.mark.parametrize(
    "name", ["row", "row float32", "row fast", "tensor", "MXFP8 fast", "MXFP8", "NVFP4", "delayed"]
)
def test_recipes_with_kernels_run_strictly(name):
    model = linear(RECIPES[name]).cuda()
    x, sizes = tensor(810, H).cuda().requires_grad_(), torch.tensor(SIZES).cuda()
    with fusible.config(strict=True):
        model(x, split_sizes=sizes).sum().backward()

    assert bool(x.grad[:300].any())


@pytest.mark.parametrize("name", ["row e5m2", "block e5m2"])
def test_what_is_not_computed_in_its_format_says_so_and_is_refused_when_strict(name):
    model = linear(RECIPES[name]).cuda()
    x, sizes = tensor(810, H).cuda().requires_grad_(), torch.tensor(SIZES).cuda()
    explanation = str(fusible.explain(model, x, split_sizes=sizes))
    with fusible.config(strict=True), pytest.raises(fusible.RefusedError):
        model(x, split_sizes=sizes).sum().backward()

    assert "multiplied in 16 bits" in explanation


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
@each_recipe
def test_nothing_waits_for_the_device(recipe):
    """A CUDA graph cannot be captured of what does."""
    model = experts(recipe).cuda()
    x, dy, sizes = tensor(810, H).cuda().requires_grad_(), tensor(810, H, seed=2).cuda(), torch.tensor(SIZES).cuda()

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


@pytest.mark.parametrize("name", ["row", "tensor", "MXFP8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_added_to(name, dtype):
    op = linear(RECIPES[name], bias=False, accumulate_into_main_grad=True).cuda()
    op.weight.main_grad = torch.ones_like(op.weight, dtype=dtype)
    x, dy, sizes = tensor(810, H).cuda(), tensor(810, F, seed=2).cuda(), torch.tensor(SIZES).cuda()
    for _ in range(2):
        op(x.requires_grad_(), split_sizes=sizes).backward(dy)
    expected = run(linear(RECIPES[name], bias=False), "cpu", x.detach().cpu(), dy.cpu(), split_sizes=sizes.cpu())

    assert_close({"weight": op.weight.main_grad.cpu()}, {"weight": 1 + 2 * expected["weight"].float()}, 5e-3)


@pytest.mark.parametrize("wgrad", ["float8", "bfloat16"])
def test_main_grads_of_16_bits_under_blocks(wgrad):
    op = linear(fusible.Float8Block(wgrad=wgrad), bias=False, accumulate_into_main_grad=True).cuda()
    op.weight.main_grad = torch.ones_like(op.weight)
    x, dy, sizes = tensor(810, H).cuda(), tensor(810, F, seed=2).cuda(), torch.tensor(SIZES).cuda()
    op(x.requires_grad_(), split_sizes=sizes).backward(dy)
    other = linear(fusible.Float8Block(wgrad=wgrad), bias=False).cuda()
    other(x.detach().requires_grad_(), split_sizes=sizes).backward(dy)

    assert_close({"w": op.weight.main_grad.cpu()}, {"w": 1 + other.weight.grad.float().cpu()}, 4e-3)


@each_recipe
def test_quantised_weights_give_the_numbers_of_the_recipe(recipe):
    if recipe == RECIPES["delayed"]:
        pytest.skip("has no steps before")
    model = experts(recipe, single_grouped_weight=False).cuda()
    x, sizes = tensor(810, H).cuda(), torch.tensor(SIZES).cuda()
    with torch.no_grad():
        expected = model(x, split_sizes=sizes)
        y = fusible.quantize_(model, recipe)(x, split_sizes=sizes)

    assert torch.equal(y, expected)
