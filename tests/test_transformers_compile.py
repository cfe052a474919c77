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

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

from hugging_face import experts_of, make

import fusible.integrations.transformers  # noqa: F401

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
