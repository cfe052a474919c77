"""Errors that tell their reader what to do, where Python or torch alone would not."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fusible import (
    ArgumentError,
    FusedOp,
    GroupedLinear,
    GroupedMLP,
    Linear,
    Op,
    Pattern,
    Pointwise,
    RoutedLoRA,
    RoutedMLP,
    Sequential,
    SwiGLU,
)
from fusible.fuser.contract.errors import did_you_mean

X = torch.randn(4, 3, requires_grad=True)


class Returning(Op):
    """An op whose ``bwd`` returns what it was given."""

    class Saved(NamedTuple):
        pass

    def __init__(self, grads: Any) -> None:
        super().__init__()
        self.grads = grads

    def fwd(self, x: Tensor) -> tuple[Tensor, Any]:
        return x * 2, self.Saved()

    def bwd(self, saved: Any, dy: Tensor) -> Any:
        return self.grads


@pytest.mark.parametrize(("grads", "came"), [(torch.ones(4, 3), "a Tensor"), (None, "a NoneType")])
def test_gradients_without_names(grads: Any, came: str) -> None:
    words = f"Returning.bwd must return gradients by name, such as {{'x': dx}}, it returned {came}"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        Sequential(Returning(grads))(X).sum().backward()


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (3,), (4, 1)], ids=str)
def test_a_gradient_of_another_shape(shape: tuple[int, ...]) -> None:
    words = f"Returning.bwd returned a gradient of shape {list(shape)} for 'x', whose shape is [4, 3]"
    with pytest.raises(RuntimeError, match=f"^{re.escape(words)}$"):
        Sequential(Returning({"x": torch.ones(shape)}))(X).sum().backward()


def test_a_gradient_that_was_broadcast_is_summed() -> None:
    (gradient,) = torch.autograd.grad(Returning({"x": torch.ones(5, 4, 3)})(X).sum(), [X])
    assert torch.equal(gradient, torch.full((4, 3), 5.0))


class Uninitialised(Returning):
    """An op whose ``__init__`` forgets that of its base."""

    def __init__(self) -> None:
        self.grads = {}


@pytest.mark.parametrize("call", [lambda op: op(X), lambda op: Sequential(op)(X)], ids=["alone", "in a container"])
def test_an_op_whose_base_is_not_initialised(call: Callable[[Op], Tensor]) -> None:
    words = r"^Uninitialised\.__init__ must call super\(\)\.__init__\(\) before it does anything else$"
    with pytest.raises(TypeError, match=words):
        call(Uninitialised())


def test_a_condition_whose_arguments_are_swapped() -> None:
    with pytest.raises(TypeError, match=r"Pattern\.where: expected a reason and a predicate, got <function"):
        Pattern.path(linear=Linear).where(lambda m: True, "the linear has a bias")  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [GroupedMLP, RoutedMLP, RoutedLoRA])
def test_a_fused_op_that_is_built_by_hand(fused: type[FusedOp]) -> None:
    words = rf"{fused.__name__} is a fused op, which a container builds .* fusible\.Sequential"
    with pytest.raises(TypeError, match=words):
        fused(4, 32, 64)


def test_keywords_by_position() -> None:
    words = "GroupedLinear: only x is passed by position, and by name: grad_input, output, split_sizes"
    with pytest.raises(ArgumentError, match=words):
        GroupedLinear(2, 3, 4)(X, [2, 2])
    with pytest.raises(ArgumentError, match="SwiGLU: only x is passed by position, as there are no keywords"):
        SwiGLU()(X, X)


def test_a_pointwise_of_no_function() -> None:
    with pytest.raises(TypeError, match="Pointwise: expected a function of tensors, got 3"):
        Pointwise(3)  # type: ignore[arg-type]


def test_a_keyword_with_a_slip() -> None:
    with pytest.raises(ArgumentError, match=r"no op takes the keyword 'split_size'.*; did you mean 'split_sizes'\?"):
        Sequential(GroupedLinear(2, 3, 4))(X, split_size=[2, 2])


def test_a_keyword_of_an_op_alone_with_a_slip() -> None:
    words = "GroupedLinear takes no 'split_size'; its keywords are: grad_input, output, split_sizes; did you mean"
    with pytest.raises(ArgumentError, match=rf"^{words} 'split_sizes'\?$"):
        GroupedLinear(2, 3, 4, bias=False)(X, split_size=[2, 2])


@pytest.mark.parametrize(
    ("op_kwargs", "words"),
    [
        ({"fc1": {"split_size": [2, 2]}}, r"op fc1 \(GroupedLinear\) takes no 'split_size'; .*mean 'split_sizes'\?$"),
        ({"fcl": {"split_sizes": [2, 2]}}, r"no op is named 'fcl'; .*op fc1 .*; did you mean 'fc1'\?$"),
    ],
    ids=["keyword", "name"],
)
def test_op_kwargs_with_a_slip(op_kwargs: Any, words: str) -> None:
    model = Sequential(OrderedDict(fc1=GroupedLinear(2, 3, 4), out=GroupedLinear(2, 4, 4)))
    with pytest.raises(ArgumentError, match=f"^op_kwargs: {words}"):
        model(X, op_kwargs=op_kwargs)


def test_no_guess_where_nothing_is_near() -> None:
    assert did_you_mean("temperature", ["split_sizes", "scales"]) == ""


class Whole(int):
    """Such as an integer of numpy: an int for Python, another type for us."""


@pytest.mark.parametrize(
    ("sizes", "came"),
    [
        ([2, Whole(2)], "a list with a test_error_texts.Whole; give [int(n) for n in sizes]"),
        ([2.0, 2.0], "a list with a float"),
        ("22", "a str"),
        (np.array([2, 2]), "a ndarray; give torch.as_tensor(sizes)"),
    ],
)
def test_split_sizes_that_are_no_ints(sizes: Any, came: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"or a list of ints, got {came}") + "$"):
        Sequential(GroupedLinear(2, 3, 4))(X, split_sizes=sizes)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tanh, "got tanh; fusible.Pointwise makes one of a function"),
        ([Linear(3, 3)], "got a list; give its modules one by one, as Sequential(*modules)"),
        (Linear, "got the class Linear; give an object, such as Linear(...)"),
        (3, "got 3; torch.nn.Module is the base of both"),
    ],
    ids=["function", "list", "class", "number"],
)
def test_children_that_are_no_modules(value: Any, words: str) -> None:
    with pytest.raises(
        TypeError, match=f"^{re.escape('Sequential: module 1 must be an op or another module, ' + words)}$"
    ):
        Sequential(Linear(3, 3), value)
