"""Linears and experts with a recipe on our own kernels, against the definition on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from checks.device import needs_hopper

import fusible

pytestmark = [pytest.mark.cuda, needs_hopper]
E, H, F = 4, 512, 384
RECIPES = [fusible.Float8Block(), fusible.Float8Block(scales="float32"), fusible.Float8Block(wgrad="bfloat16")]
SIZES = (300, 0, 1, 500)


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(recipe, **options):
    torch.manual_seed(1)
    return fusible.GroupedLinear(E, H, F, dtype=torch.bfloat16, recipe=recipe, **options)


def experts(recipe, bias=False):
    torch.manual_seed(1)
    options = {"bias": bias, "dtype": torch.bfloat16, "recipe": recipe}
    first, second = fusible.GroupedLinear(E, H, 2 * F, **options), fusible.GroupedLinear(E, F, H, **options)
    return fusible.Sequential(first, fusible.SwiGLU(), second)


def routed(recipe):
    dispatch, combine = fusible.Dispatch(E), fusible.Combine()
    first, act, second = experts(recipe)
    return fusible.Sequential(dispatch, first, act, second, fusible.Scale(), combine)


def run(model, device, x, dy, **keywords):
    model = copy.deepcopy(model).to(device)
    x = x.to(device).requires_grad_()
    y = model(x, **{name: value.to(device) for name, value in keywords.items()})
    y.backward(dy.to(device))
    grads = {name: p.grad.cpu() for name, p in model.named_parameters()}
    return {"y": y.detach().cpu(), "x": x.grad.cpu(), **grads}


def assert_close(ours, theirs, bound):
    assert ours.keys() == theirs.keys()
    for name in ours:
        far, size = (ours[name].float() - theirs[name].float()).norm(), theirs[name].float().norm()
        assert far <= bound * size, (name, float(far), float(size))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"transposed_weight": True}, {"single_grouped_weight": False}])
def test_a_linear_is_close_to_the_definition(recipe, options):
    x, dy, sizes = tensor(810, H), tensor(810, F, seed=2), torch.tensor(SIZES)
    model = linear(recipe, **options)

    assert_close(*(run(model, device, x, dy, split_sizes=sizes) for device in ("cuda", "cpu")), 4e-3)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_close_to_the_definition(recipe, bias):
    x, dy, sizes = tensor(810, H), tensor(810, H, seed=2), torch.tensor(SIZES)
    model = experts(recipe, bias)

    assert_close(*(run(model, device, x, dy, split_sizes=sizes) for device in ("cuda", "cpu")), 2e-2)


def test_a_routed_layer_is_close_to_the_definition():
    x, dy = tensor(600, H), tensor(600, H, seed=2)
    ids = torch.randint(0, E, (600, 2), generator=torch.Generator().manual_seed(3))
    routing = {"top_k_index": ids, "top_k_weights": tensor(600, 2, seed=4).float().abs()}
    model = routed(fusible.Float8Block())

    assert_close(*(run(model, device, x, dy, **routing) for device in ("cuda", "cpu")), 2e-2)


def test_products_run_on_our_own_kernels():
    x, sizes = tensor(810, H).cuda().requires_grad_(), torch.tensor(SIZES).cuda()
    model = linear(fusible.Float8Block()).cuda()
    with fusible.config(strict=True):
        model(x, split_sizes=sizes).sum().backward()
        step = fusible.explain(model, x, split_sizes=sizes).steps[0]

    assert step.kernel == "hopper (quantise) + hopper (e4m3)"
    assert step.reason == ""


def test_calls_are_replayed_with_the_same_bits():
    model = linear(fusible.Float8Block(), bias=False).cuda()
    x, dy, sizes = tensor(810, H).cuda(), tensor(810, F, seed=2).cuda(), torch.tensor(SIZES).cuda()
    results = []
    for _ in range(4):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = model(leaf, split_sizes=sizes)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, model.weight.grad))
    said = fusible.explain(model, x.requires_grad_(), split_sizes=sizes).replay

    for later in results[1:]:
        for a, b in zip(results[0], later, strict=True):
            assert torch.equal(a, b)
    assert "not replayed" not in said, said


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_a_cuda_graph_of_a_forward_and_backward():
    model = experts(fusible.Float8Block()).cuda()
    x, dy, sizes = tensor(810, H).cuda().requires_grad_(), tensor(810, H, seed=2).cuda(), torch.tensor(SIZES).cuda()

    def step():
        y = model(x, split_sizes=sizes)
        return (y, *torch.autograd.grad(y, [x, *model.parameters()], dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()

    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
