"""Experts of transformers models on a GPU: our kernels, no host synchronisation, graphs, the same bits every time."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusible

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from hugging_face import experts_of, make

import fusible.integrations.transformers
from fusible.benchmarks.hf import MODELS as SIZES
from fusible.benchmarks.hf import Block
from fusible.benchmarks.timing import kept_bytes, peak_bytes

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]
MODELS = ["mixtral", "qwen3", "gpt-oss", "nemotron-h", "gemma-4"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


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
    parts = str(layer.explanation.steps[0].kernel).split(" + ")
    products = [part for part in parts if part != "activation" and not part.startswith("fusible (")]
    assert products != []
    assert all(product.startswith("hopper") for product in products)
    assert layer.routing == "fusible"


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_does_not_wait_for_the_device(name: str) -> None:
    experts = module(name)
    arguments = inputs(experts, 64)
    expected = results(experts, "fusible", *arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = results(experts, "fusible", *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert {n for n, t in expected.items() if not torch.equal(found[n], t)} == set()


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


def of_blocks(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        y = block(x)
        x = x + (y[0] if isinstance(y, tuple) else y).view_as(x)
    return x


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_compiled_trains_as_eager_does(name: str) -> None:
    """Blocks one by one, which share their code, and all at once; what is ours keeps its bits, the router may not."""
    stack = Block(SIZES[name], 16, "cuda", torch.bfloat16, layers=3)
    stack.use("fusible")
    blocks, counter = stack.stack.blocks, CompileCounterWithBackend("inductor")
    alone = [torch.compile(block, fullgraph=True, backend=counter) for block in blocks]
    whole = torch.compile(of_blocks, fullgraph=True)
    for tokens in (200, 64, 300):
        x, dy = stack.rows(tokens, grad=True), stack.rows(tokens)
        leaves = [x, *(block.experts.down_proj for block in blocks)]
        truth = torch.autograd.grad(of_blocks(blocks, x), leaves, dy)
        for y in (of_blocks(alone, x), whole(blocks, x)):
            grads = torch.autograd.grad(y, leaves, dy)
            assert max(relative(g, t) for g, t in zip(grads, truth, strict=True)) < 0.05
    assert counter.frame_count <= 3


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_compiled_experts_have_the_bits_of_eager(name: str) -> None:
    experts = module(name)
    compiled = torch.compile(experts, fullgraph=True)
    for tokens in (64, 300):
        x, index, weights = inputs(experts, tokens)
        leaves, found = [x, weights, *experts.parameters()], []
        for run in (experts, compiled):
            y = run(x, index, weights)
            found.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        with torch.no_grad():
            assert torch.equal(compiled(x, index, weights), experts(x, index, weights))


def test_compiled_keeps_what_eager_keeps() -> None:
    stack = Block(SIZES["qwen3-moe"], 8, "cuda", torch.bfloat16)
    x, found = stack.rows(4096, grad=True), {}
    for name in ("fusible", "fusible compiled"):
        stack.step(name, x)()
        found[name] = kept_bytes(stack.recorded(name, x), "cuda"), peak_bytes(stack.step(name, x), "cuda")
    for eager, compiled in zip(*found.values(), strict=True):
        assert compiled < 1.05 * eager + 2**20


def test_compiled_decode_in_graphs_of_inductor() -> None:
    stack = Block(SIZES["gpt-oss"], 16, "cuda", torch.bfloat16, layers=2)
    for tokens in (1, 16, 1, 16, 1, 16):
        x = stack.rows(tokens)
        y = stack.forward("fusible compiled, graphs", x)().clone()
        assert relative(y, stack.forward("fusible", x)()) < 0.02


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize(
    ("dtype", "how"), [(torch.bfloat16, {}), (torch.float32, {}), (torch.float32, {"disable_compile": True})]
)
def test_generates_with_a_static_cache(name: str, dtype: torch.dtype, how: dict[str, bool]) -> None:
    """transformers compiles the steps of decoding then, with CUDA graphs."""
    model = make(name, dtype).cuda().eval()
    model.set_experts_implementation("fusible")
    for tokens in (5, 9):
        ids = torch.arange(2, 2 + tokens, device="cuda").view(1, tokens)
        found = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="static", **how)
        assert found.shape == (1, tokens + 8)
        if how:
            assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_generates_what_eager_generates(name: str) -> None:
    model = make(name).cuda().eval()
    ids = torch.randint(2, 64, (1, 5), generator=torch.Generator().manual_seed(3)).cuda()
    texts = []
    for implementation in ("eager", "fusible"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids, max_new_tokens=32, do_sample=False))

    assert torch.equal(*texts)
