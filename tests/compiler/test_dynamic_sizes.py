"""Sizes that are symbols of a compiler: routed experts for any number of tokens, in compiled and in exported code."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusible import (
    MXFP8,
    Combine,
    Dispatch,
    Float8Block,
    Float8Row,
    GroupedLinear,
    GroupedLoRA,
    MoE,
    MoEOutput,
    Router,
    Scale,
    Sequential,
    SwiGLU,
    config,
    functional,
)
from fusible.ops.kernels import extension
from fusible.ops.kernels.doors import routing

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    *[pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")],
]
E, H, F, K = 4, 8, 12, 2
routed_experts = functional.routed_experts


def weights(e: int = E, h: int = H, f: int = F) -> tuple[Tensor, Tensor]:
    return torch.randn(e, 2 * f, h), torch.randn(e, h, f)


def tokens(t: int, *, k: int = K, e: int = E, h: int = H, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x, the experts of each token, and their weights."""
    scores, ids = torch.rand(t, e).topk(k)
    return torch.randn(t, h, requires_grad=grad), ids, scores.requires_grad_(grad)


def results(function: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of those that want one."""
    y = function(*operands)
    trained = [operand for operand in operands if operand.requires_grad]
    return y.detach(), *(torch.autograd.grad(y.square().sum(), trained) if trained else ())


# ------------------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_any_number_of_tokens_is_two_compilations(backend: str, grad: bool) -> None:
    counter, lent = CompileCounterWithBackend(backend), [w.requires_grad_(grad) for w in weights()]
    compiled = torch.compile(routed_experts, backend=counter, fullgraph=True)
    for t in (5, 7, 9, 40, 5):
        operands = *tokens(t, grad=grad), *lent
        assert_same(results(compiled, *operands), results(routed_experts, *operands))

    assert counter.frame_count == 2


@pytest.mark.parametrize("recipe", [Float8Block(), Float8Row(gradient="e5m2"), MXFP8()], ids=str)
def test_any_number_of_quantised_tokens_is_two_compilations(recipe: Any) -> None:
    counter, lent = CompileCounterWithBackend("aot_eager"), [w.bfloat16().requires_grad_() for w in weights()]
    compiled = torch.compile(routed_experts, backend=counter, fullgraph=True)
    for t in (5, 7, 9, 40):
        x, ids, scores = tokens(t, grad=True)
        operands = x.detach().bfloat16().requires_grad_(), ids, scores, *lent
        with config(recipe=recipe):
            assert_same(results(compiled, *operands), results(routed_experts, *operands))

    assert counter.frame_count == 2


def test_weights_of_a_module() -> None:
    counter, layer = CompileCounterWithBackend("aot_eager"), Functional()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for t in (5, 7, 9):
        operands = tokens(t, grad=True)
        assert_same(results(compiled, *operands), results(layer, *operands))

    assert counter.frame_count == 2


def test_any_k_is_two_compilations() -> None:
    counter, lent = CompileCounterWithBackend("aot_eager"), weights()
    compiled = torch.compile(routed_experts, backend=counter, fullgraph=True)
    for k in (2, 3, 4):
        operands = *tokens(5, k=k), *lent
        assert torch.equal(compiled(*operands), routed_experts(*operands))

    assert counter.frame_count == 2


@pytest.mark.parametrize("how", ["dynamic", "marked"])
def test_dynamic_from_the_first_call_on(how: str) -> None:
    counter, lent = CompileCounterWithBackend("aot_eager"), weights()
    compiled = torch.compile(
        routed_experts, backend=counter, fullgraph=True, dynamic=True if how == "dynamic" else None
    )
    for t in (5, 7, 9):
        operands = tokens(t)
        for operand in operands if how == "marked" and t == 5 else ():
            torch._dynamo.mark_dynamic(operand, 0)
        assert torch.equal(compiled(*operands, *lent), routed_experts(*operands, *lent))

    assert counter.frame_count == 1


def test_weights_of_other_forms() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(routed_experts, backend=counter, fullgraph=True)
    forms = [(4, 8, 12), (3, 8, 12), (4, 16, 12), (4, 8, 24), (6, 20, 10)]
    for e, h, f in forms:
        lent = weights(e, h, f)
        for t in (5, 7, 9):
            operands = *tokens(t, e=e, h=h), *lent
            assert torch.equal(compiled(*operands), routed_experts(*operands))

    assert counter.frame_count == len(forms) + 1


def test_wrong_sizes_are_named() -> None:
    compiled = torch.compile(routed_experts, backend="aot_eager", fullgraph=True, dynamic=True)
    up, down = weights()

    with pytest.raises(Exception, match="routed_experts: w_down must be"):
        compiled(*tokens(5), up, down.mT.contiguous())
    with pytest.raises(Exception, match=r"routed_experts: op dispatch \(Dispatch\): top_k_index must be"):
        compiled(torch.randn(6, H), *tokens(5)[1:], up, down)


def known(mode: FakeTensorMode) -> tuple[int, ...]:
    return 5, K


def symbolic(mode: FakeTensorMode) -> tuple[int, ...]:
    return mode.from_tensor(torch.empty(7, K)).shape


@pytest.mark.parametrize("before", [known, symbolic])
def test_a_gpu_moves_any_number_of_rows(before: Callable[[FakeTensorMode], tuple[int, ...]]) -> None:
    """The GPU is not there; another compiler traced as many experts before."""
    for shape_of in (before, symbolic):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        t, k = shape_of(mode)
        with mode, extension.assume(extension.HOPPER):
            routes = routing.route(torch.empty(t, k, dtype=torch.int64, device="cuda"), E)
            rows = routing.permute(torch.empty(t, H, device="cuda"), routes)
            y = routing.unpermute(rows, routes)

    assert routes.is_native
    assert type(t) is torch.SymInt
    assert (str(rows.shape[0]), str(y.shape[0])) == (str(t * k), str(t))


# ------------------------------------------------------------------------------------------------------------ exported


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = map(nn.Parameter, weights())

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return routed_experts(x, ids, scores, self.up, self.down)


class Container(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module] = GroupedLinear) -> None:
        super().__init__()
        up, down = linear(E, H, 2 * F), linear(E, F, H)
        self.layer = Sequential(Dispatch(E), up, SwiGLU(), down, Scale(), Combine())

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        y: Tensor = self.layer(x, top_k_index=ids, top_k_weights=scores)
        return y


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Sequential(GroupedLinear(E, H, 2 * F), SwiGLU(), GroupedLinear(E, F, H))

    def forward(self, x: Tensor, split_sizes: Tensor) -> Tensor:
        y: Tensor = self.layer(x, split_sizes=split_sizes)
        return y


def lora(*sizes: int) -> nn.Module:
    return GroupedLoRA(*sizes, rank=2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "function": Functional,
    "container": Container,
    "lora": lambda: Container(lora),
    "layer": lambda: MoE(H, F, experts=E, top_k=K),
    "layer with shared experts": lambda: MoE(H, F, experts=E, top_k=K, shared_ffn=F),
    "router": lambda: Router(H, E, K),
}


def inputs(layer: nn.Module, t: int) -> tuple[Tensor, ...]:
    return tokens(t)[:1] if isinstance(layer, MoE | Router) else tokens(t)


def saved_and_loaded(program: Any) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("called", [False, True], ids=["", "after calls"])
@pytest.mark.parametrize("kind", LAYERS)
def test_exported_for_any_number_of_tokens(kind: str, called: bool, strict: bool) -> None:
    layer = LAYERS[kind]().eval()
    for _ in range(3 if called else 0):
        layer(*inputs(layer, 5))
    arguments = inputs(layer, 5)
    shapes = ({0: torch.export.Dim("tokens", min=2)},) * len(arguments)
    program = saved_and_loaded(torch.export.export(layer, arguments, dynamic_shapes=shapes, strict=strict))
    for t in (2, 5, 9, 100):
        arguments = inputs(layer, t)
        torch.testing.assert_close(program(*arguments), layer(*arguments))


def test_an_exported_layer_returns_what_the_layer_does() -> None:
    layer = MoE(H, F, experts=E, top_k=K).eval()
    program = saved_and_loaded(torch.export.export(layer, (x := torch.randn(5, H),)))

    assert isinstance(program(x), MoEOutput)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("order", [*itertools.permutations(["eager", "static", "dynamic"])], ids="-".join)
def test_exports_in_any_order(order: tuple[str, ...], strict: bool) -> None:
    layer, arguments = Grouped(), (torch.randn(6, H), torch.tensor([2, 0, 3, 1]))
    for what in order:
        if what == "eager":
            assert torch.equal(layer(*arguments), layer(*arguments))
            continue
        shapes = {"static": None, "dynamic": ({0: torch.export.Dim("rows")}, None)}[what]
        program = torch.export.export(layer, arguments, dynamic_shapes=shapes, strict=strict).module()
        x = torch.randn(6 if what == "static" else 9, H)
        torch.testing.assert_close(program(x, arguments[1]), layer(x, arguments[1]))


def test_an_export_is_no_last_call() -> None:
    layer, arguments = Grouped(), (torch.randn(6, H), torch.tensor([2, 0, 3, 1]))
    layer(*arguments)
    before = str(layer.layer.explain())
    torch.export.export(layer, arguments, dynamic_shapes=({0: torch.export.Dim("rows")}, None), strict=False)

    assert str(layer.layer.explain()) == before


@torch.no_grad()  # such a graph is of a forward alone
@pytest.mark.parametrize("layer", [Functional, Container])
@pytest.mark.parametrize("parameters", ["constants", "arguments"])
def test_symbolic_tracing(parameters: str, layer: Callable[[], nn.Module]) -> None:
    module = layer()
    given = {name: p.detach() for name, p in module.named_parameters()} if parameters == "arguments" else {}

    def call(given: dict[str, Tensor], *arguments: Tensor) -> Any:
        return torch.func.functional_call(module, given, arguments)

    graph = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(given, *tokens(5))
    operands = tokens(9)
    torch.testing.assert_close(graph(given, *operands), module(*operands))
