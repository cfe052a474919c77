"""``torch.compile(fullgraph=True)`` of transformers models whose experts run through us."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from hugging_face import experts_of, make
from reference import assert_same

import fusible
import fusible.integrations.transformers
from fusible.benchmarks.hf import MODELS, Block
from fusible.benchmarks.timing import kept_bytes

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def results(run: Any, experts: Any, tokens: int) -> list[Tensor]:
    """The output and all gradients."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=generator).requires_grad_()
    index = torch.rand(tokens, 4, generator=generator).argsort(-1)[:, :2]
    weights = torch.rand(tokens, 2, generator=generator).requires_grad_()
    y = run(x, index, weights)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weights, *experts.parameters()])]


def _note_our_ops(seen: list[str], graph: Any, _: Any) -> Any:
    """As the compiler of a graph: notes the custom ops in it."""
    seen.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("fusible."))
    return make_boxed_func(graph.forward)


@pytest.mark.parametrize(("name", "gate"), [("mixtral", "known"), ("gpt-oss", "known"), ("nemotron-h", "unknown")])
def test_experts_compile_before_any_call(name: str, gate: str) -> None:
    experts = experts_of(make(name))[0]
    experts.config._experts_implementation = "fusible"
    if gate == "unknown":
        experts.act_fn = nn.Softsign()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)

    for tokens in (9, 17):
        torch.testing.assert_close(results(compiled, experts, tokens), results(experts, experts, tokens))


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_without_gradients_the_layer_is_one_op(name: str) -> None:
    experts = experts_of(make(name))[0]
    experts.config._experts_implementation = "fusible"
    seen: list[str] = []
    backend = aot_autograd(fw_compiler=partial(_note_our_ops, seen))
    compiled = torch.compile(experts, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for tokens in (9, 17):
            x, index = torch.randn(tokens, 32), torch.rand(tokens, 4).argsort(-1)[:, :2]
            weights = torch.rand(tokens, 2)
            torch.testing.assert_close(compiled(x, index, weights), experts(x, index, weights))

    assert seen == ["fusible.routed_mlp.default"]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_frozen_parts_and_ids_of_no_expert(name: str) -> None:
    experts = experts_of(make(name))[0]
    experts.config._experts_implementation = "fusible"
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)
    x, index, weights = torch.randn(9, 32), torch.rand(9, 4).argsort(-1)[:, :2], torch.rand(9, 2)
    index[::2, 0] = experts.num_experts
    leaves = [x, weights, *experts.parameters()]
    for trained in range(len(leaves)):
        for place, leaf in enumerate(leaves):
            leaf.requires_grad_(place == trained)
        torch._dynamo.reset()  # torch 2.11 does not look at the parameters of a module again
        found = []
        for run in (compiled, experts):
            y = run(x, index, weights)
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves[trained])))
        assert_same(*found)


def test_autocast_and_no_tokens() -> None:
    experts = experts_of(make("gpt-oss"))[0]
    experts.config._experts_implementation = "fusible"
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for tokens in (9, 0):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (results(run, experts, tokens) for run in (compiled, experts))
        assert found[0].dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    with torch.no_grad():
        assert compiled(torch.randn(0, 32), torch.zeros(0, 2, dtype=torch.long), torch.rand(0, 2)).shape == (0, 32)


@pytest.mark.parametrize(
    "switches",
    [
        {"backend": "loop"},
        {"disable_fusions": ("RoutedMLP", "GroupedMLP", "GroupedLinearGLU")},
        {"backend": "loop", "strict": True},
    ],
    ids=str,
)
def test_switches_are_seen(switches: dict[str, Any]) -> None:
    experts = experts_of(make("gpt-oss"))[0]
    experts.config._experts_implementation = "fusible"
    seen: list[str] = []
    backend = aot_autograd(fw_compiler=partial(_note_our_ops, seen))
    compiled = torch.compile(experts, fullgraph=True, backend=backend)
    expected = results(experts, experts, 9)
    torch.testing.assert_close(results(compiled, experts, 9), expected)
    before = list(seen)
    with fusible.config(**switches):
        torch.testing.assert_close(results(compiled, experts, 9), expected, rtol=1e-3, atol=1e-3)

    assert len(seen) > len(before)  # compiled anew
    assert ("fusible.grouped_linear_activation.default" in seen[len(before) :]) == ("disable_fusions" not in switches)


def test_changed_gates_compile_anew() -> None:
    experts, other = (experts_of(make(name))[0] for name in ("gpt-oss", "mixtral"))
    for module in (experts, other):
        module.config._experts_implementation = "fusible"
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(results(compiled, module, 9), results(module, module, 9))
        module.limit, module.act_fn = 0.5, nn.GELU(approximate="tanh")
        torch.testing.assert_close(results(compiled, module, 9), results(module, module, 9))


def interleaved_atan(self: Any, gate_up: Tensor) -> Tensor:
    return torch.atan(self.steepness * gate_up[..., ::2]) * gate_up[..., 1::2]


@pytest.mark.parametrize("change", ["gate", "activation"])
def test_functions_that_are_no_built_in_fuse_in_compiled_code(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of(make("mixtral"))[0]
    experts.config._experts_implementation = "fusible"
    experts.act_fn, experts.steepness = nn.LeakyReLU(0.3), 0.5
    if change == "gate":
        monkeypatch.setattr(type(experts), "_apply_gate", interleaved_atan)
    seen: list[str] = []
    compiled = torch.compile(experts, fullgraph=True, backend=aot_autograd(fw_compiler=partial(_note_our_ops, seen)))
    torch.testing.assert_close(results(compiled, experts, 9), results(experts, experts, 9))
    experts.act_fn.negative_slope, experts.steepness = 0.1, 2.0

    torch.testing.assert_close(results(compiled, experts, 9), results(experts, experts, 9))
    assert seen.count("fusible.grouped_linear_activation.default") == 2


@pytest.mark.parametrize("change", ["gate", "hook"])
def test_gates_of_one_module_are_seen(change: str) -> None:
    experts = experts_of(make("mixtral"))[0]
    experts.config._experts_implementation = "fusible"
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    results(compiled, experts, 9)
    if change == "gate":
        experts._apply_gate = lambda rows: rows[..., ::2].tanh()
    else:
        experts.act_fn.register_forward_hook(lambda module, args, y: 2 * y)
    torch._dynamo.reset()  # hooks are looked at when it is compiled

    torch.testing.assert_close(results(compiled, experts, 9), results(experts, experts, 9))


def test_parametrized_weights_are_not_computed_by_the_compiler() -> None:
    """As PEFT has its adapters of parameters: cached while the model runs, so that guards look at what is there."""

    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    experts = experts_of(make("mixtral"))[0]
    experts.config._experts_implementation = "fusible"
    nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", Halved())
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with nn.utils.parametrize.cached():
        found = results(compiled, experts, 9)

    torch.testing.assert_close(found, results(experts, experts, 9))


def run_of(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        y = block(x)
        x = x + (y[0] if isinstance(y, tuple) else y).view_as(x)
    return x


@pytest.mark.parametrize("name", MODELS)
def test_many_blocks_share_their_code(name: str) -> None:
    """One by one and all at once; more of them than torch keeps compilations of one function."""
    stack = Block(MODELS[name], 64, "cpu", torch.float32, layers=10)
    stack.use("fusible")
    blocks, counter = stack.stack.blocks, CompileCounterWithBackend("aot_eager")
    alone = nn.ModuleList([torch.compile(block, fullgraph=True, backend=counter) for block in blocks])
    for tokens in (5, 12, 7):
        x, dy = stack.rows(tokens, grad=True), stack.rows(tokens)
        found = [torch.autograd.grad(run_of(by, x), [x, *blocks.parameters()], dy) for by in (alone, blocks)]
        assert_same(*found)
    assert counter.frame_count <= 3  # the first block's tokens are a leaf, the others' are not

    counter = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(run_of, fullgraph=True, backend=counter)
    for tokens in (5, 12, 7):
        x = stack.rows(tokens)
        assert torch.equal(whole(blocks, x), run_of(blocks, x))
    assert counter.frame_count == 2


def test_keeps_for_the_backward_what_eager_keeps() -> None:
    stack = Block(MODELS["qwen3-moe"], 16, "cpu", torch.float32)
    stack.use("fusible")
    (block,), x = stack.stack.blocks, stack.rows(64, grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager_decomp_partition")
    kept = []
    for run in (block, compiled):
        torch.autograd.grad(run(x).sum(), x)
        kept.append(kept_bytes(lambda run=run: run(x)))
    rows = 64 * 8 * x.shape[-1] * x.element_size()

    assert abs(kept[1] - kept[0]) < rows // 4


@pytest.mark.parametrize("strict", [True, False])
def test_exported_layer_is_one_op(strict: bool) -> None:
    experts = experts_of(make("gpt-oss"))[0]
    experts.config._experts_implementation = "fusible"
    given = torch.randn(9, 32), torch.rand(9, 4).argsort(-1)[:, :2], torch.rand(9, 2)
    with torch.no_grad():
        program = torch.export.export(experts, given, strict=strict)
        ours = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("fusible.")]
        assert torch.equal(program.module()(*given), experts(*given))

    assert ours == ["fusible.routed_mlp.default"]


def test_model_compiles_without_a_break() -> None:
    model = make("mixtral")
    model.set_experts_implementation("fusible")
    ids = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for run in (torch.compile(model, fullgraph=True, backend="eager"), model):
        model.zero_grad()
        output = run(ids, labels=ids)
        output.loss.backward()
        found.append((output.logits.detach(), [p.grad.clone() for p in model.parameters()]))

    torch.testing.assert_close(found[0], found[1])


def test_generates_with_a_static_cache() -> None:
    """transformers compiles the steps of decoding then: on a GPU, and wherever a configuration says so."""
    from transformers import CompileConfig

    torch._dynamo.reset()
    model, texts = make("mixtral").eval(), []
    how = CompileConfig(backend="aot_eager", mode=None)
    how._compile_all_devices = True
    for implementation in ("eager", "fusible"):
        model.set_experts_implementation(implementation)
        ids = torch.arange(2, 7).view(1, 5)
        texts.append(model.generate(ids, max_new_tokens=4, cache_implementation="static", compile_config=how))

    assert torch.equal(*texts)
