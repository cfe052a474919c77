"""``grouped_gemm`` under ``torch.compile(fullgraph=True)``: plain tensors in one graph, the bits of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_same
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException, Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from fusible import NVFP4, Float8Row, Float8Tensor, GroupedTensor, config, grouped_gemm
from fusible.functional import routed_experts

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    *[pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")],
]
SIZES = torch.tensor([3, 0, 4])  # and a tail
SHAPES = {"NT": ((9, 4), (3, 6, 4)), "NN": ((9, 4), (3, 4, 6)), "TN": ((9, 4), (9, 6))}


def results(function: Any, *operands: Tensor, **how: Any) -> tuple[Tensor, ...]:
    y = function(*operands, SIZES, **how)
    return y.detach(), *torch.autograd.grad(y.square().sum(), operands)


@pytest.mark.parametrize("layout", SHAPES)
def test_gives_the_bits_of_eager(layout: str) -> None:
    a, b = (torch.randn(shape, requires_grad=True) for shape in SHAPES[layout])
    compiled = torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")

    assert_same(
        results(compiled, a, b, layout=layout, alpha=2.0), results(grouped_gemm, a, b, layout=layout, alpha=2.0)
    )


def test_any_number_of_rows_is_two_compilations() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    weight, bias = torch.randn(3, 4, 6), torch.randn(3, 6)
    compiled = torch.compile(grouped_gemm, fullgraph=True, backend=counter)
    for rows in (9, 12, 30):
        x = torch.randn(rows, 4)
        given = {"offsets": SIZES.cumsum(0), "bias": bias}
        assert torch.equal(compiled(x, weight.mT, **given), grouped_gemm(x, weight.mT, **given))

    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_writes_where_it_is_told(backend: str) -> None:
    x, weight = torch.randn(9, 4), torch.randn(3, 6, 4)
    made = []
    for function in (grouped_gemm, torch.compile(grouped_gemm, fullgraph=True, backend=backend)):
        out = torch.ones(9, 6)
        made.append((function(x, weight, SIZES, out=out, accumulate=True), out))

    assert_same(made[1], made[0])


def test_wrong_arguments_are_refused_while_compiling() -> None:
    compiled = torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")

    with pytest.raises(TorchDynamoException, match="NT contracts 5 of a with 4 of b"):
        compiled(torch.randn(9, 5), torch.randn(3, 6, 4), SIZES)


def test_groups_of_any_shapes_break_the_graph() -> None:
    def multiply(a: Any, b: Any) -> Any:
        product: Any = grouped_gemm(a, b)
        return product.data

    operands = GroupedTensor(torch.randn(9, 4), SIZES), GroupedTensor(torch.randn(3, 6, 4))
    assert torch.equal(torch.compile(multiply, backend="eager")(*operands), multiply(*operands))
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="a GroupedTensor cannot be part of a graph"):
        torch.compile(multiply, fullgraph=True, backend="eager")(*operands)


@pytest.mark.parametrize("recipe", [Float8Row(), NVFP4(), Float8Tensor()], ids=str)
def test_routed_experts_under_a_recipe(recipe: Any) -> None:
    x, up, down = (torch.randn(shape).bfloat16() for shape in ((6, 32), (4, 64, 32), (4, 32, 32)))
    weights, ids = torch.rand(6, 4).topk(2)
    compiled = torch.compile(routed_experts, fullgraph=True, backend="aot_eager")
    plain = routed_experts(x, ids, weights, up, down)
    for disabled in ((), ("RoutedMLP", "GroupedMLP")):
        with config(recipe=recipe, disable_fusions=disabled):
            quantized = routed_experts(x, ids, weights, up, down)
            assert torch.equal(compiled(x, ids, weights, up, down), quantized)
        assert not torch.equal(quantized, plain)
    assert torch.equal(compiled(x, ids, weights, up, down), plain)
