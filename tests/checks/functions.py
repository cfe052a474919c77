"""Functions of users for the checks of epilogues: published activations, and random ones by their seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import pi

import torch
import torch.nn.functional as F
from test_pointwise import BINARY, UNARY, function_of
from torch import Tensor

from fusible import Activation, AddExtraInput, Bias, ConstantScale, Op, Pointwise, Scale, SwiGLU
from fusible.ops.fused.pointwise_chain import PointwiseChain
from fusible.ops.values.activation_spec import Interleaved

Function = Callable[..., Tensor]


def telu(x: Tensor) -> Tensor:
    """Fernandez and Mali, "TeLU activation function for fast and stable deep learning", arXiv:2412.20269."""
    return x * torch.tanh(torch.exp(x))


def xielu(x: Tensor) -> Tensor:
    """Huang and Schlag, "Deriving activation functions using integration", arXiv:2411.13010; as Apertus starts."""
    beta, positive, negative = 0.5, 0.8, 0.5 + 0.8
    below = (torch.expm1(x.clamp(max=-1e-6)) - x) * negative + beta * x
    return torch.where(x > 0, positive * x * x + beta * x, below)


def serf(x: Tensor) -> Tensor:
    """Nag, Bhattacharyya and others, "SERF: towards better training of deep neural networks", arXiv:2108.09598."""
    return x * torch.erf(F.softplus(x))


def phish(x: Tensor) -> Tensor:
    """Naveen, "Phish: a novel hyper-optimizable activation function", 2022."""
    return x * torch.tanh(F.gelu(x))


def smish(x: Tensor) -> Tensor:
    """Wang, Ren and Wang, "Smish: a novel activation function for deep learning methods", Electronics 11(4), 2022."""
    return x * torch.tanh(torch.log1p(torch.sigmoid(x)))


def gish(x: Tensor) -> Tensor:
    """Kaytan and others, "Gish: a novel activation function for image classification", 2023."""
    return x * torch.log(2 - torch.exp(-torch.exp(x)))


def star_relu(x: Tensor) -> Tensor:
    """Yu and others, "MetaFormer baselines for vision", arXiv:2210.13452, with the numbers of its section 2."""
    return 0.8944 * torch.relu(x).square() - 0.4472


def xatglu(gate: Tensor, up: Tensor) -> Tensor:
    """Huang, "Expanded gating ranges improve activation functions", arXiv:2405.20768, with an alpha of 0.2."""
    return gate * ((torch.atan(gate) / pi + 0.5) * 1.4 - 0.2) * up


PUBLISHED: dict[str, tuple[Function, int]] = {
    "telu": (telu, 1),
    "xielu": (xielu, 1),
    "serf": (serf, 1),
    "phish": (phish, 1),
    "smish": (smish, 1),
    "gish": (gish, 1),
    "star relu": (star_relu, 1),
    "xatglu": (xatglu, 2),
    "telu glu": (lambda gate, up: telu(gate) * up, 2),
}
"""With the number of halves that each takes."""


def learned_slope(gate: Tensor, up: Tensor, beta: Tensor) -> Tensor:
    """A gate whose slope each expert learns for each column."""
    return gate * torch.sigmoid(gate * beta) * up


def learned_slope_of_a_row(gate: Tensor, up: Tensor, scale: Tensor, beta: Tensor) -> Tensor:
    """As :func:`learned_slope`; not linear in the number of the row."""
    return torch.tanh(gate * beta * scale) * up


def learned_shift(x: Tensor, beta: Tensor, shift: Tensor) -> Tensor:
    """Ungated, with two numbers of a column."""
    return torch.tanh(x * beta + shift) + 0.5 * shift


OF_COLUMNS: dict[str, tuple[Function, int, tuple[str, ...]]] = {
    "slope": (learned_slope, 2, ("beta",)),
    "slope of a row": (learned_slope_of_a_row, 2, ("beta",)),
    "swish": (lambda x, beta: x * torch.sigmoid(x * beta), 1, ("beta",)),
    "shift": (learned_shift, 1, ("beta", "shift")),
}
"""With the number of halves, and the parameters that are numbers of a column."""


def op_of_columns(name: str, halves: str | Interleaved = "concat") -> Pointwise:
    """A function of :data:`OF_COLUMNS` as an op, with room for columns of any groups."""
    function, count, columns = OF_COLUMNS[name]
    return Pointwise(function, halves=halves if count == 2 else None, columns=dict.fromkeys(columns, (1, 1)))


def chain(*ops: Op) -> PointwiseChain:
    """The ops as one program."""
    return PointwiseChain(**{f"op{i}": op for i, op in enumerate(ops)})


Act = Pointwise | PointwiseChain
ACTS_OF_COLUMNS: dict[str, tuple[Callable[[str | Interleaved], Act], Function]] = {
    "biases": (
        lambda halves: chain(Bias(2), SwiGLU(layout=halves), op_of_columns("swish"), Bias(1)),
        lambda gate, up, a, b, slope, c: (
            F.silu(gate + a) * (up + b) * torch.sigmoid(F.silu(gate + a) * (up + b) * slope) + c
        ),
    ),
    "slopes of gate and up": (
        lambda halves: chain(op_of_columns("swish"), SwiGLU(layout=halves)),
        lambda gate, up, a, b: F.silu(gate * torch.sigmoid(gate * a)) * up * torch.sigmoid(up * b),
    ),
    "bias": (lambda halves: chain(Bias(1), Activation("gelu")), lambda x, a: F.gelu(x + a)),
    "sums and products alone": (
        lambda halves: chain(Bias(1), ConstantScale(0.75), Scale(), Bias(1)),
        lambda x, s, a, b: (x + a) * 0.75 * s + b,
    ),
}
"""Chains of which numbers of columns are of all rows, of groups, or of gate and up, and what they compute."""


ACTS_OF_MATRICES: dict[str, tuple[Callable[[str | Interleaved], Act], Function]] = {
    "residual": (
        lambda halves: chain(SwiGLU(layout=halves), AddExtraInput()),
        lambda gate, up, m: F.silu(gate) * up + m,
    ),
    "residual behind a scale": (
        lambda halves: chain(SwiGLU(layout=halves), Scale(), AddExtraInput(), Pointwise(torch.tanh)),
        lambda gate, up, s, m: torch.tanh(F.silu(gate) * up * s + m),
    ),
    "added to gate and up": (
        lambda halves: chain(AddExtraInput(), SwiGLU(layout=halves), Bias(1)),
        lambda gate, up, a, m, n: F.silu(gate + m) * (up + n) + a,
    ),
    "two beside columns": (
        lambda halves: chain(AddExtraInput("m"), op_of_columns("swish"), AddExtraInput("n")),
        lambda x, slope, m, n: (x + m) * torch.sigmoid((x + m) * slope) + n,
    ),
    "sums and products alone": (
        lambda halves: chain(AddExtraInput(), Scale(), Bias(1)),
        lambda x, s, a, m: (x + m) * s + a,
    ),
}
"""Chains that read matrices, and what they compute."""


def op_of(function: Function, count: int, halves: str | Interleaved = "concat") -> Pointwise:
    """The function as an op, of gate and up if it takes two halves."""
    return Pointwise(function, halves=halves if count == 2 else None)


def random_function(seed: int) -> tuple[Function, int]:
    """Up to ten operations on earlier values, each bounded; of one half or two, with a number of the row or without."""
    chosen = random.Random(seed)
    steps = [
        (chosen.choice([*UNARY, *BINARY]), chosen.randrange(20), chosen.randrange(20))
        for _ in range(chosen.randint(2, 10))
    ]
    count, has_row = chosen.choice([1, 2]), chosen.random() < 0.4
    function = function_of(steps, None)
    forms: dict[tuple[int, bool], Function] = {
        (1, False): lambda x: function(x),
        (1, True): lambda x, r: function(x, r),
        (2, False): lambda x, u: function(x, u),
        (2, True): lambda x, u, r: function(x, u, r),
    }
    return forms[count, has_row], count
