"""Experts of transformers models on a GPU: our kernels, no host synchronisation, graphs, the same bits every time."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from hugging_face import experts_of, make

import fusible.integrations.transformers

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]
MODELS = ["mixtral", "qwen3", "gpt-oss", "nemotron-h", "gemma-4"]


def module(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    experts = experts_of(make(name))[0].cuda().to(dtype)
    experts.config._experts_implementation = "fusible"
    return experts


def inputs(experts: Any, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, 32, generator=generator, device="cuda").to(dtype).requires_grad_()
    index = torch.rand(tokens, experts.num_experts, generator=generator, device="cuda").argsort(-1)[:, :2]
    return x, index, torch.rand(tokens, 2, generator=generator, device="cuda").requires_grad_()


def results(experts: Any, implementation: str, x: Tensor, index: Tensor, weights: Tensor) -> dict[str, Tensor]:
    experts.config._experts_implementation = implementation
    leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    y = experts(x, index, weights)
    grads = torch.autograd.grad(y.float().square().sum(), list(leaves.values()))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_as_exact_as_grouped_mm(name: str, tokens: int) -> None:
    experts = module(name)
    arguments = inputs(experts, tokens)
    exact = module(name, torch.float64)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), experts.parameters(), strict=True):
            wide.copy_(narrow)
    x, index, weights = arguments
    truth = results(
        exact, "eager", x.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_()
    )
    ours, theirs = (results(experts, implementation, *arguments) for implementation in ("fusible", "eager"))

    assert {n for n, t in truth.items() if relative(ours[n], t) > 2 * relative(theirs[n], t) + 2e-3} == set()


@pytest.mark.parametrize("name", MODELS)
def test_runs_on_our_kernels(name: str) -> None:
    experts = module(name)
    results(experts, "fusible", *inputs(experts, 64))
    holder = torch.nn.ModuleDict({"experts": experts})

    (layer,) = fusible.explain(holder).layers
    products = [part for part in str(layer.explanation.steps[0].kernel).split(" + ") if part != "activation"]
    assert products != []
    assert all(product.startswith("hopper") for product in products)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_does_not_wait_for_the_device(name: str) -> None:
    experts = module(name)
    arguments = inputs(experts, 64)
    results(experts, "fusible", *arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(experts, "fusible", *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_replays_with_other_tokens_and_experts() -> None:
    experts = module("gpt-oss")
    x, index, weights = (t.detach().clone() for t in inputs(experts, 64))
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            experts(x, index, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, index, weights)
        for seed in range(3):
            generator = torch.Generator("cuda").manual_seed(seed)
            x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
            index.copy_(torch.rand(64, experts.num_experts, generator=generator, device="cuda").argsort(-1)[:, :2])
            graph.replay()
            assert torch.equal(y, experts(x, index, weights))


def test_twice_is_bitwise_the_same() -> None:
    experts = module("qwen3")
    arguments = inputs(experts, 300)
    first, second = (results(experts, "fusible", *arguments) for _ in range(2))

    assert all(torch.equal(t, second[n]) for n, t in first.items())


def test_ids_of_no_expert_add_nothing() -> None:
    experts = module("gpt-oss")
    x, index, weights = inputs(experts, 64)
    index[::2] = experts.num_experts
    found = results(experts, "fusible", x, index, weights)

    assert float(found["y"][::2].abs().sum()) == 0
    assert float(found["weights"][::2].abs().sum()) == 0
    assert float(found["x"][::2].abs().sum()) == 0
    assert all(bool(t.isfinite().all()) for t in found.values())


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_generates_what_eager_generates(name: str) -> None:
    model = make(name).cuda().eval()
    ids = torch.randint(2, 64, (1, 5), generator=torch.Generator().manual_seed(3)).cuda()
    texts = []
    for implementation in ("eager", "fusible"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids, max_new_tokens=32, do_sample=False))

    assert torch.equal(*texts)
