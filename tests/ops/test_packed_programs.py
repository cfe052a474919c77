"""Functions of gate and up in one tensor: where the halves lie, what they compute, and which built-in that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import passes_gradients_at_limits
from torch import Tensor
from torch.nn import functional as F

from fusible import GLU, ClampedSwiGLU, Pointwise, interleaved
from fusible.ops.basic.recognition import recognized
from fusible.ops.programs.activations import ACTIVATIONS
from fusible.ops.programs.packed import trace_packed
from fusible.ops.programs.tracing import NotPointwiseError, UnknownFunctionError
from fusible.ops.values.activation_spec import ActivationSpec, spec_of_program


def chunks(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return gate.atan() * up


def chunks_in_float32(rows: Tensor) -> Tensor:
    gate, up = torch.chunk(rows, 2, -1)
    return (gate.float().atan() * up.float()).to(rows.dtype)


def split(rows: Tensor) -> Tensor:
    gate, up = rows.split(rows.shape[-1] // 2, -1)
    return gate.atan() * up


def sliced(rows: Tensor) -> Tensor:
    width = rows.size(-1) // 2
    return rows[:, :width].atan() * rows[..., width:]


def every_second(rows: Tensor) -> Tensor:
    return rows[..., ::2].atan() * rows[..., 1::2]


def pairs(rows: Tensor) -> Tensor:
    gate, up = rows.reshape(rows.shape[0], -1, 2).unbind(-1)
    return gate.atan() * up


def up_first(rows: Tensor) -> Tensor:
    up, gate = rows.chunk(2, dim=-1)
    return gate.atan() * up


@pytest.mark.parametrize(
    ("function", "block"),
    [
        (chunks, None),
        (chunks_in_float32, None),
        (split, None),
        (sliced, None),
        (up_first, None),
        (every_second, 1),
        (pairs, 1),
    ],
)
def test_layout_is_read(function: Callable[[Tensor], Tensor], block: int | None) -> None:
    program, read = trace_packed(function)
    rows = torch.randn(6, 32)

    assert read == block
    spec = spec_of_program(program, read)
    op = GLU("silu")
    op.spec = spec
    torch.testing.assert_close(op(rows), function(rows))


def squared_before(rows: Tensor) -> Tensor:
    gate, up = rows.square().chunk(2, dim=-1)
    return gate * up


def of_a_part(rows: Tensor) -> Tensor:
    return rows[..., : rows.shape[-1] // 2 - 1].tanh()


def shifted(rows: Tensor) -> Tensor:
    return rows[..., 1 : rows.shape[-1] // 2 + 1] * 2.0


def both_layouts(rows: Tensor) -> Tensor:
    return rows[..., ::2] * rows.chunk(2, dim=-1)[1]


def of_the_row(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return gate.softmax(-1) * up


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (squared_before, NotPointwiseError, "calls square on gate and up together"),
        (of_a_part, NotPointwiseError, "calls tanh on gate and up together"),
        (shifted, NotPointwiseError, "calls mul on gate and up together"),
        (both_layouts, NotPointwiseError, "both_layouts: does not take its columns in two halves of one layout"),
        (of_the_row, UnknownFunctionError, "of_the_row: kernels do not know _softmax"),
    ],
)
def test_what_cannot_be_read_is_an_error(
    function: Callable[[Tensor], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trace_packed(function)


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": lambda x: 1.0 / (1.0 + torch.exp(-x)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_built_in_activations_are_recognized(name: str) -> None:
    assert recognized(Pointwise(FUNCTIONS[name]).program) == ActivationSpec(name)
    gated = Pointwise(lambda gate, up: FUNCTIONS[name](gate) * up, halves=interleaved(4)).program
    assert recognized(gated) == ActivationSpec(name, gated=True)


def test_limits_slopes_and_offsets_are_recognized() -> None:
    spec = recognized(Pointwise(gpt_oss, halves="concat").program)

    if not passes_gradients_at_limits():  # built-in activations do
        assert spec is None
        return
    assert spec is not None
    assert spec.program is None
    x = 8 * torch.randn(64, 12, dtype=torch.float64)
    op = GLU("silu")
    op.spec = spec
    torch.testing.assert_close(op(x), ClampedSwiGLU()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.tanh(),
        lambda x: x * torch.sigmoid(1.7021 * x),
        lambda x: F.gelu(x) + 1e-6,
        lambda x: torch.relu(x).detach() + 0.0 * x,
    ],
)
def test_other_functions_are_not_recognized(function: Callable[[Tensor], Tensor]) -> None:
    assert recognized(Pointwise(function).program) is None


def test_clamp_is_relu_where_it_has_its_gradient_at_zero() -> None:
    expected = None if passes_gradients_at_limits() else ActivationSpec("relu")

    assert recognized(Pointwise(lambda x: x.clamp(min=0.0)).program) == expected
