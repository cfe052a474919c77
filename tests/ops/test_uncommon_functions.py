"""Functions that few would write, on numbers that few would give: what autograd says, or an error with a cure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusible import Pointwise, Sequential, interleaved

NUMBERS = [0.0, 1e-45, 1e-38, 1e-3, 0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 6.0, 20.0, 88.0, 104.0, 1e4, 1e30, 3e38, inf]
SPECIAL = [*NUMBERS, *[-number for number in NUMBERS], nan]
HALF, THREE = torch.tensor(0.5, dtype=torch.float64), torch.tensor([3])


class PassesBack(torch.autograd.Function):
    """The sign, with a gradient that is not its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 3.0


class TurnsBack(torch.autograd.Function):
    """A product whose gradient has the wrong sign, and none of up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(up)
        return x * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return -dy * ctx.saved_tensors[0], None


def nested(x: Tensor) -> Tensor:
    inner = torch.where(x > 1, torch.where(x > 2, x * 3, x**2), x)
    return torch.where(x > 0, inner, torch.where(x < -1, -x, 0.5 * x))


def scaled(x: Tensor, alpha: float, beta: float = 2.0) -> Tensor:
    return x * alpha + beta


class Scaled:
    number = 2.5

    def scale(self, x: Tensor) -> Tensor:
        return x * self.number


UNCOMMON: dict[str, tuple[Callable[..., Tensor], int]] = {
    "x": (lambda x: x, 1),
    "gate": (lambda x, u: x, 2),
    "up": (lambda x, u: u, 2),
    "gate less up": (torch.sub, 2),
    "neither": (lambda x, u: torch.ones_like(x), 2),
    "twice the same": (lambda x: x * x - x, 1),
    "half of it detached": (lambda x: x * x.detach(), 1),
    "sign": (torch.sign, 1),
    "abs": (torch.abs, 1),
    "cube": (lambda x: x**3, 1),
    "root": (lambda x: x**0.5, 1),
    "x to the x": (lambda x: x**x, 1),
    "power": (lambda x, u: x**u, 2),
    "power of a number": (lambda x: 2**x, 1),
    "nested": (nested, 1),
    "log where positive": (lambda x: torch.where(x > 0, torch.log(x), 0.0), 1),
    "root where positive": (lambda x: torch.where(x > 0, torch.sqrt(x), 0.0), 1),
    "maximum": (torch.maximum, 2),
    "clamped by a tensor": (lambda x, u: x.clamp(-u.abs(), u.abs()), 2),
    "clamped by less than more": (lambda x: x.clamp(1, -1), 1),
    "softplus": (lambda x: F.softplus(x, beta=0.5, threshold=3), 1),
    "softshrink": (F.softshrink, 1),
    "hardshrink": (F.hardshrink, 1),
    "lerp": (lambda x, u: torch.lerp(x, u, 0.25), 2),
    "lerp by a tensor": (lambda x, u: torch.lerp(x, u, torch.sigmoid(u)), 2),
    "nan to num": (lambda x: torch.nan_to_num(x.exp(), posinf=5.0), 1),
    "other gradient": (PassesBack.apply, 1),
    "wrong gradient": (TurnsBack.apply, 2),
    "sum of truth values": (lambda x: ((x > 0) + (x > 1)) * x, 1),
    "sum of truth values as a number": (lambda x: ((x > 0) + (x > 1)).float() + x, 1),
    "truth value of x": (lambda x: x.bool() * x + x.bool(), 1),
    "where a truth value of x": (lambda x: torch.where(x.bool(), x + 1, 3.0), 1),
    "choice of truth values": (lambda x: torch.where(torch.where(x > 0, True, False), x, -x), 1),
    "truth value copied": (lambda x: torch.zeros_like(x).copy_(x > 0) + torch.zeros_like(x).copy_(x > 1) + x, 1),
    "compared truth values": (lambda x: ((x > 0) == (x > 1)) * x, 1),
    "closure over tensors": (lambda x: x * HALF - THREE, 1),
    "part of a function": (partial(scaled, alpha=3.0), 1),
    "method": (Scaled().scale, 1),
    "of a loop": ([lambda x, k=k: x * k for k in range(3)][2], 1),
    "in place with an index": (lambda x: x.clone().mul_(2).clamp_(-3, 3), 1),
}
DIFFERENT_AT_NAN = {"softshrink", "hardshrink"}
"""PyTorch's kernels for a CPU give a gradient of zero, those for CUDA that of the result, as programs do."""
BY_PYTORCH: dict[str, tuple[Callable[..., Tensor], int]] = {
    "rounded to a hundredth": (lambda x: torch.round(x, decimals=2), 1),
    "quotient rounded down": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), 1),
    "remainder": (lambda x: x % 0.3, 1),
    "to integers": (lambda x: x.long() * x, 1),
    "without a gradient": (lambda x: x.clamp(-9, 9).long().float(), 1),
    "transposed": (lambda x: (x.t() * 2).t(), 1),
    "einsum": (lambda x, u: torch.einsum("ij,ij->ij", x, u), 2),
    "softmax of two": (lambda x, u: torch.softmax(torch.stack([x, u]), 0)[0], 2),
    "assigned where": (lambda x: x.clone().index_put_((x > 1,), torch.tensor(1.0)), 1),
}
HALVES = {1: None, 2: interleaved(1)}


def columns_of(count: int, dtype: torch.dtype) -> Tensor:
    """Every special number, with every other one for gate and up."""
    numbers = torch.tensor(SPECIAL, dtype=torch.float64).to(torch.float32).to(dtype)
    if count == 1:
        return numbers.repeat(3, 1)
    return torch.stack([numbers.repeat_interleave(len(numbers)), numbers.repeat(len(numbers))], -1).flatten()[None]


def by_autograd(function: Callable[..., Tensor], count: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient of x, where the gradient of the value is 0.75."""
    leaf = x.detach().clone().requires_grad_()
    y = function(*[(half * 1.0) for half in (leaf.view(x.shape[0], -1, 2).unbind(-1) if count == 2 else (leaf,))])
    if not y.requires_grad:
        return y, torch.zeros_like(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, torch.full_like(y, 0.75), materialize_grads=True)[0]


def check(function: Callable[..., Tensor], count: int, dtype: torch.dtype, different_at_nan: bool = False) -> None:
    op, x = Pointwise(function, halves=HALVES[count]), columns_of(count, dtype).requires_grad_()
    y = op(x)
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 0.75))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = [each.to(dtype) for each in by_autograd(function, count, x.to(wide))]
    if different_at_nan:
        dx, expected[1] = (torch.where(x.isnan(), 0.0, grad) for grad in (dx, expected[1]))
    tolerance = 1e-12 if dtype == torch.float64 else 2.0**-18 if dtype == torch.float32 else torch.finfo(dtype).eps
    for got, right in zip((y.detach(), dx), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", UNCOMMON)
def test_value_and_gradient_on_special_numbers(name: str, dtype: torch.dtype) -> None:
    function, count = UNCOMMON[name]
    assert Pointwise(function, halves=HALVES[count]).program is not None
    check(function, count, dtype, name in DIFFERENT_AT_NAN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BY_PYTORCH)
def test_what_kernels_do_not_know_is_run_by_pytorch(name: str, dtype: torch.dtype) -> None:
    function, count = BY_PYTORCH[name]
    assert "kernels do not know" in str(Pointwise(function, halves=HALVES[count]).refusal)
    check(function, count, dtype)


@pytest.mark.parametrize("function", [lambda x, u, s: x, lambda x, u, s: x - u + 0 * s], ids=["gate", "difference"])
@pytest.mark.parametrize("halves", ["concat", interleaved(2)], ids=str)
def test_a_gate_whose_gradient_is_that_of_the_result(function: Callable[..., Tensor], halves: Any) -> None:
    op, x, s = Pointwise(function, halves=halves), torch.randn(3, 8, requires_grad=True), torch.rand(3)
    dy = torch.randn(3, 4)
    (dx,) = torch.autograd.grad(op(x, s=s), x, dy)
    width = 4 if halves == "concat" else 2
    leaf = x.detach().requires_grad_()
    gate, up = (part.flatten(-2) for part in leaf.view(3, -1, 2, width).unbind(-2))
    assert torch.equal(dx, torch.autograd.grad(function(gate, up, s[:, None]), leaf, dy)[0])


class OfARow(nn.Module):
    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        return x * s


def test_parameters_of_a_module_are_those_of_its_forward() -> None:
    x, s = torch.randn(4, 6), torch.rand(4)
    assert torch.equal(Pointwise(OfARow())(x, s=s), x * s[:, None])
    assert torch.equal(Pointwise(OfARow(), constants={"s": 2.0})(x), x * 2)
    assert torch.equal(Pointwise(OfARow(), columns={"s": torch.full((6,), 3.0)})(x), x * 3)


@pytest.mark.parametrize("module", [nn.PReLU(), nn.Linear(7, 7), nn.Sequential(nn.PReLU(6), nn.ReLU())])
def test_a_module_with_parameters_says_what_to_do(module: nn.Module) -> None:
    words = r"has parameters of its own, (0\.)?weight.*; write a function that takes them as arguments, .* in columns"
    with pytest.raises(ValueError, match=words):
        Pointwise(module)


@pytest.mark.parametrize("name", ["name", "program", "refusal", "constants", "forward", "training", "spec"])
def test_columns_that_would_hide_an_attribute_are_refused(name: str) -> None:
    function = eval(f"lambda x, {name}: x * {name}")
    with pytest.raises(ValueError, match=f"columns cannot be called '{name}'"):
        Pointwise(function, columns={name: (6,)})
    assert Pointwise(function)(torch.ones(2, 6), **{name: torch.rand(2)}).shape == (2, 6)


@pytest.mark.parametrize("name", ["self", "op_kwargs"])
def test_parameters_that_no_call_can_name_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"is called '{name}', which is reserved"):
        Pointwise(eval(f"lambda x, {name}: x * {name}"))


@pytest.mark.parametrize("function", ["silu", 3, None])
def test_what_cannot_be_called_is_named(function: Any) -> None:
    with pytest.raises(TypeError, match=f"expected a function of tensors, got {function!r}"):
        Pointwise(function)


def test_an_error_of_the_backward_names_the_function() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.heaviside(x, torch.tensor(0.5))

    with pytest.raises(RuntimeError, match="heaviside is not implemented") as raised:
        Pointwise(step)
    assert "the backward of step raised this on tensors [" in raised.value.__notes__[0]


def test_explain_says_why_pytorch_runs_a_function() -> None:
    model = Sequential(Pointwise(torch.special.i0))
    assert "PyTorch runs it: special_i0: kernels do not know i0" in str(model.explain(torch.randn(2, 3)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_does_not_change_what_is_read() -> None:
    with torch.autograd.set_detect_anomaly(True):
        program = Pointwise(F.silu).program
        assert torch.is_anomaly_enabled()
    assert program == Pointwise(F.silu).program
    assert program is not None


def test_a_group_without_rows_has_a_gradient_of_zero() -> None:
    op = Pointwise(lambda x, u, beta: torch.lerp(x, u, 0.5) * beta, halves="concat", columns={"beta": torch.ones(3, 4)})
    op(torch.randn(5, 8), split_sizes=torch.tensor([3, 0, 2])).sum().backward()
    assert op.beta.grad[1].eq(0).all()
    assert op.beta.grad[[0, 2]].ne(0).all()
