"""Functions that no kernel knows: read once as operations of PyTorch, or kept where PyTorch cannot follow them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_same
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from fusible import GroupedLinear, Linear, Pointwise, Sequential, interleaved

i0 = torch.special.i0
SIZES = torch.tensor([2, 0, 3])


class Doubled(torch.autograd.Function):
    """Has a gradient of its own, which is not that of its value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return i0(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * dy * x


class OutsideOfPyTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tensor([[math.sinh(number) for number in row] for row in x.tolist()], dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def kept_function(x: Tensor) -> Tensor:
    y: Tensor = OutsideOfPyTorch.apply(i0(x) * 0 + x)
    return y


def in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    return i0(x).add_(x)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], tuple[str, ...]]] = {
    "one": (lambda x: i0(x) * 0.3, {}, ()),
    "of a row": (lambda x, s: i0(x) * s + i0(s), {}, ("s",)),
    "halves": (lambda gate, up: i0(gate) * up, {"halves": "concat"}, ()),
    "interleaved": (lambda gate, up, s: i0(gate * s) * up, {"halves": interleaved(2)}, ("s",)),
    "columns": (lambda x, b: i0(x * b), {"columns": {"b": torch.linspace(-1, 1, 8)}}, ()),
    "columns of groups": (lambda x, b: i0(x) * b, {"columns": {"b": torch.randn(3, 8)}}, ("split_sizes",)),
    "constants": (lambda x, c: i0(x).clamp(max=c) * c, {"constants": {"c": 1.7}}, ()),
    "own gradient": (Doubled.apply, {}, ()),
    "in place": (in_place, {}, ()),
    "without a gradient": (lambda x: i0(torch.zeros_like(x)), {}, ()),
    "of another device": (lambda x: i0(x) + torch.ones(x.shape, device=x.device, dtype=x.dtype), {}, ()),
}


def arguments(
    names: tuple[str, ...], rows: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    made = {"s": torch.rand(rows, dtype=dtype, requires_grad=True), "split_sizes": SIZES}
    return torch.randn(rows, 8, dtype=dtype, requires_grad=True), {name: made[name] for name in names}


def results(
    op: Callable[..., Tensor], x: Tensor, keywords: dict[str, Tensor], trained: list[Tensor]
) -> tuple[Tensor, ...]:
    y = op(x, **keywords)
    inputs = [x, *[k for k in keywords.values() if k.requires_grad], *trained]
    dy = torch.arange(y.numel()).view(y.shape) % 5 - 2  # the same in every dtype
    return y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))


def by_hand(op: Pointwise, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function on the operands of the op, under autograd, in double precision."""

    def call(x: Tensor, split_sizes: Tensor | None = None, **rows: Tensor) -> Tensor:
        block = x.shape[1] // 2 if op.halves == "concat" else getattr(op.halves, "block", None)
        halves = [x.double()] if block is None else [*x.double().unflatten(1, (-1, 2, block)).unbind(2)]
        by_row = [r.double()[:, None] for r in rows.values()]
        columns = [c.double() for c in op.parameters()]
        if split_sizes is not None:
            columns = [c[torch.repeat_interleave(torch.arange(3), split_sizes)] for c in columns]
        return function(*[h.flatten(1) * 1.0 for h in halves], *by_row, *columns, *op.constants.values())

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_gives_what_autograd_gives(kind: str, dtype: torch.dtype) -> None:
    function, how, names = FUNCTIONS[kind]
    op = Pointwise(function, **how)
    x, keywords = arguments(names, dtype=dtype)
    trained = list(op.parameters())
    expected = results(by_hand(op, function), x, keywords, trained) if kind != "without a gradient" else None

    assert op.program is None
    assert op.promises.eager_only is None
    got = results(op, x, keywords, trained)
    if expected is None:
        assert not got[1].any()
        return
    torch.testing.assert_close(got, tuple(t.to(g.dtype) for t, g in zip(expected, got, strict=True)))


@pytest.mark.parametrize(("rows", "features"), [(0, 4), (1, 4), (4, 1), (1, 1), (9, 3)])
def test_any_number_of_rows_and_columns(rows: int, features: int) -> None:
    op = Pointwise(lambda x, s: i0(x) * s)
    x, s = torch.randn(rows, features, requires_grad=True), torch.rand(rows, requires_grad=True)

    torch.testing.assert_close(results(op, x, {"s": s}, []), results(lambda x, s: i0(x) * s[:, None], x, {"s": s}, []))


def test_what_is_read_outside_stays() -> None:
    number, tensor = 2.0, torch.tensor(3.0)
    op = Pointwise(lambda x: i0(x) * number + tensor)
    x, keywords = arguments(())
    before = results(op, x, keywords, [])
    number = 5.0
    tensor.fill_(7)

    assert_same(results(op, x, keywords, []), before)
    torch.testing.assert_close(before[0], i0(x.detach()) * 2 + 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_is_copied_and_pickled(kind: str, copied: Callable[[Pointwise], Pointwise]) -> None:
    function, how, names = FUNCTIONS[kind]
    op, (x, keywords) = Pointwise(function, **how), arguments(names)
    other = copied(op)

    assert_same(results(other, x, keywords, [*other.parameters()]), results(op, x, keywords, [*op.parameters()]))


def test_constants_may_change() -> None:
    op = Pointwise(lambda x, c: i0(x) * c, constants={"c": 2.0})
    x, _ = arguments(())
    other = pickle.loads(pickle.dumps(op))
    other.constants = {"c": -1.5}

    torch.testing.assert_close(other(x), i0(x) * -1.5)
    torch.testing.assert_close(op(x), i0(x) * 2)


def test_a_tensor_that_is_no_argument_is_refused() -> None:
    table = torch.randn(48)

    with pytest.raises(ValueError, match=r"<lambda>: reads a tensor of shape \[48\] that is not one of its arguments"):
        Pointwise(lambda x: i0(x) + table.sum())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_compiles_into_one_graph(kind: str) -> None:
    function, how, names = FUNCTIONS[kind]
    op = Pointwise(function, **how)
    x, keywords = arguments(names)
    for model in (op, Sequential(op)):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same(results(compiled, x, keywords, [*op.parameters()]), results(model, x, keywords, [*op.parameters()]))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "function", [lambda x: i0(x) + torch.tensor(2.0), lambda x: x.relu() * 2], ids=["unknown", "known"]
)
def test_is_exported_for_any_number_of_rows(function: Callable[..., Tensor]) -> None:
    model = nn.Sequential(Linear(8, 8), Pointwise(function), Linear(8, 8))
    program = torch.export.export(model, (torch.randn(5, 8),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    x = torch.randn(9, 8)

    torch.testing.assert_close(program.module()(x), model(x))


# --------------------------------------------------------------------------------------- what PyTorch cannot follow


def test_a_function_outside_of_pytorch_is_kept() -> None:
    op, (x, _) = Pointwise(kept_function), arguments(())
    y, dx = results(op, x, {}, [])

    torch.testing.assert_close(y, torch.sinh(x.detach()))
    torch.testing.assert_close(dx, torch.arange(40.0).view(5, 8) % 5 - 2)
    assert_same(results(pickle.loads(pickle.dumps(op)), x, {}, []), (y, dx))
    assert "kept_function is not made of PyTorch's operations alone" in str(op.promises.eager_only)


def test_a_function_that_makes_numbers_of_constants_is_kept() -> None:
    op, (x, _) = Pointwise(lambda x, c: x * math.exp(c), constants={"c": 0.5}), arguments(())
    torch.testing.assert_close(op(x), x * math.exp(0.5))
    op.constants = {"c": 1.0}
    torch.testing.assert_close(op(x), x * math.exp(1.0))
    assert op.promises.eager_only is not None


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_a_kept_function_runs_eagerly_or_is_refused(grad: bool) -> None:
    model = Sequential(GroupedLinear(3, 8, 8), Pointwise(kept_function))
    x = torch.randn(5, 8, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        assert torch.equal(torch.compile(model, backend="aot_eager")(x, SIZES), model(x, SIZES))
        torch._dynamo.reset()
        with pytest.raises(TorchDynamoException, match="kept_function is not made of PyTorch's operations alone"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(x, SIZES)
