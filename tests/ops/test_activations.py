"""Activations, gated and not: values, gradients, layouts, roundings, errors."""

from __future__ import annotations

import pytest
import torch
from reference import ACTIVATIONS, assert_as_good, at_most, glu, leaves, run, split_glu, unit

from fusible import GEGLU, GLU, QGEGLU, Activation, ArgumentError, ClampedSwiGLU, ReGLU, SReGLU, SwiGLU, interleaved
from fusible.ops.basic.named_activation import activation_spec
from fusible.ops.values.activation_spec import ActivationSpec

BLOCKS = [None, 1, 4, 32]
PARAMETERS = [{}, {"limit": 0.5}, {"linear_offset": 1.0}, {"limit": 0.7, "linear_offset": -0.5}]
SLOPES = [{"alpha": 1.702}, {"alpha": -0.5}, {"limit": 0.7, "alpha": 1.702, "linear_offset": 1.0}]
GATED = [(name, how) for name in ACTIVATIONS for how in PARAMETERS] + [("silu", how) for how in SLOPES]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FORMS = [
    (SwiGLU(), "silu", {}),
    (GEGLU(), "gelu", {}),
    (GEGLU("tanh"), "gelu_tanh", {}),
    (QGEGLU(), "quick_gelu", {}),
    (ReGLU(), "relu", {}),
    (SReGLU(), "relu2", {}),
    (ClampedSwiGLU(), "silu", {"limit": 7.0, "alpha": 1.702, "linear_offset": 1.0}),
]


def layout(block):
    return "concat" if block is None else interleaved(block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("name", "how"), GATED)
def test_glu(name, how, block, dtype):
    op, tensors, dy = GLU(name, layout=layout(block), **how), {"x": unit(7, 128, dtype=dtype)}, unit(7, 64, dtype=dtype)

    assert_as_good(run(op, tensors, dy), glu(name, block=block, **how), tensors, dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name, dtype):
    tensors, dy = {"x": unit(7, 33, dtype=dtype)}, unit(7, 33, dtype=dtype)

    assert_as_good(run(Activation(name), tensors, dy), ACTIVATIONS[name], tensors, dy)


@pytest.mark.parametrize(("op", "name", "how"), FORMS)
def test_named_form_is_its_parameters(op, name, how):
    x = unit(5, 16, grad=False)

    assert torch.equal(op(x), GLU(name, **how)(x))


@pytest.mark.parametrize("form", [SwiGLU, GEGLU, QGEGLU, ReGLU, SReGLU, ClampedSwiGLU])
def test_named_form_takes_a_layout(form):
    x = unit(5, 16, grad=False)
    gate, up = split_glu(x, 4)

    torch.testing.assert_close(form(layout=interleaved(4))(x), form()(torch.cat([gate, up], -1)), rtol=1e-14, atol=0)


def test_clamped_swiglu_is_the_formula_of_gpt_oss():
    x = 8 * unit(64, 12, grad=False)
    gate, up = x[:, :6].clamp(max=7.0), x[:, 6:].clamp(min=-7.0, max=7.0)

    torch.testing.assert_close(ClampedSwiGLU()(x), (up + 1) * gate * torch.sigmoid(1.702 * gate))


def test_clamped_swiglu_takes_its_parameters():
    how = {"limit": 0.5, "alpha": 1.5, "linear_offset": 0.25}
    x = unit(6, 8, grad=False)

    assert torch.equal(ClampedSwiGLU(**how)(x), GLU("silu", **how)(x))


def test_what_is_clamped_has_gradient_zero():
    x = torch.tensor([[0.4, 0.6, -9.0, 1.0, 0.4, 0.6, -0.6, -0.4]]).requires_grad_()
    GLU("silu", limit=0.5)(x).sum().backward()

    assert x.grad.eq(0).tolist() == [[False, True, False, True, False, True, True, False]]


def test_what_lies_on_the_limit_is_not_clamped():
    x = torch.full((1, 2), 0.5).requires_grad_()
    GLU("silu", limit=0.5)(x).sum().backward()

    assert x.grad.ne(0).all()


@pytest.mark.parametrize("block", [None, 2])
def test_the_limit_is_not_rounded_to_half_precision(block):
    over = torch.tensor(0.1, dtype=torch.bfloat16)
    x = over.expand(1, 4).clone().requires_grad_()
    GLU("silu", limit=0.1, layout=layout(block))(x).sum().backward()

    assert float(over) > 0.1
    assert x.grad.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    x = unit(64, 64, dtype=dtype, grad=False)

    assert torch.equal(SwiGLU()(x), SwiGLU()(x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gradient_is_rounded_once(dtype):
    half, dy = {"x": unit(64, 64, dtype=dtype)}, unit(64, 32, dtype=dtype, grad=False)
    wide = leaves(half, torch.float32)

    assert torch.equal(run(SwiGLU(), half, dy)["x"], run(SwiGLU(), wide, dy.float())["x"].to(dtype))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("name", "how"), GATED)
def test_glu_gradcheck(name, how, block):
    assert torch.autograd.gradcheck(GLU(name, layout=layout(block), **how), unit(2, 64), fast_mode=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_gradcheck(name):
    assert torch.autograd.gradcheck(Activation(name), unit(3, 5))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (1, 64)])
def test_glu_takes_any_leading_dims(shape, block):
    x = unit(*shape, grad=False)

    torch.testing.assert_close(GLU("silu", layout=layout(block))(x), glu("silu", block=block)(x))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_glu_of_strided_x_and_dy(dtype, block):
    x, dy = unit(64, 5, dtype=dtype, grad=False).mT, unit(32, 5, dtype=dtype, grad=False).mT
    op = GLU("silu", layout=layout(block))
    strided, dense = ({"x": t.detach().requires_grad_()} for t in (x, x.contiguous()))
    a, b = run(op, strided, dy), run(op, dense, dy.contiguous())

    last_bits = {"rtol": 2 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}  # vector and scalar code of torch
    torch.testing.assert_close(a["y"], b["y"], **last_bits)
    torch.testing.assert_close(a["x"], b["x"], **last_bits)


@pytest.mark.parametrize("block", [None, 4])
def test_glu_of_expanded_dy(block):
    x = unit(5, 16)
    GLU("gelu", layout=layout(block))(x).sum().backward()

    torch.testing.assert_close(x.grad, torch.autograd.grad(glu("gelu", block=block)(x).sum(), x)[0])


def test_glu_saves_nothing_for_x_without_grad():
    op, kept = SwiGLU(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        op(unit(3, 8, grad=False))

    assert kept == []


@pytest.mark.parametrize("op", [SwiGLU(), Activation("gelu")])
def test_activation_is_deterministic(op):
    tensors, dy = {"x": unit(64, 64)}, unit(*op(unit(64, 64)).shape)

    assert torch.equal(run(op, tensors, dy)["x"], run(op, tensors, dy)["x"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activation("tanh"), "activation must be one of silu, gelu, .*; got 'tanh'"),
        (lambda: GLU("swish"), "activation must be one of .*; got 'swish'"),
        (lambda: GLU("silu", limit=0.0), "limit must be positive or None; got 0.0"),
        (lambda: GLU("silu", limit=float("nan")), "limit must be positive or None; got nan"),
        (lambda: GLU("gelu", alpha=1.7), "alpha is the slope inside silu, which 'gelu' does not have; .* got 1.7"),
        (lambda: GLU("silu", alpha=0.0), "alpha must not be 0"),
        (lambda: GLU("silu", layout="interleaved"), r"layout must be 'concat' or interleaved\(n\); got 'interleaved'"),
        (lambda: GEGLU("erf"), "approximate must be 'none' or 'tanh', got 'erf'"),
        (lambda: interleaved(0), "the block must be a positive int, got 0"),
        (lambda: interleaved(True), "the block must be a positive int, got True"),
        (lambda: interleaved(2.0), "the block must be a positive int, got 2.0"),
        (lambda: GLU("silu", alpha=float("nan")), "alpha and linear_offset must be finite; got nan and 0.0"),
        (lambda: GLU("silu", alpha=float("inf")), "alpha and linear_offset must be finite; got inf and 0.0"),
        (lambda: GLU("silu", linear_offset=float("-inf")), "alpha and linear_offset must be finite; got 1.0 and -inf"),
        (lambda: GLU("silu", alpha="steep"), "alpha must be a number; got 'steep'"),
        (lambda: GLU("silu", alpha=True), "alpha must be a number; got True"),
        (lambda: ClampedSwiGLU(limit="7"), "limit must be a number; got '7'"),
        (lambda: activation_spec("swiglu", 1), r"layout must be 'concat' or interleaved\(n\); got 1"),
        (lambda: activation_spec("relu", "blocks"), r"layout must be 'concat' or interleaved\(n\); got 'blocks'"),
        (lambda: GLU("silu", limit=[7]), r"limit must be a number; got \[7\]"),
        (lambda: ActivationSpec("silu", block=-3), "block must be at least 1 or None; got -3"),
        (lambda: ActivationSpec("swish"), "activation must be one of silu, .*; got 'swish'"),
    ],
)
def test_constructor_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("op", "x", "message"),
    [
        (SwiGLU(), torch.ones(2, 7), r"expected gate and up halves in the last dimension, got shape \[2, 7\]"),
        (SwiGLU(layout=interleaved(4)), torch.ones(2, 12), r"gate and up blocks of 4 columns .* got shape \[2, 12\]"),
        (SwiGLU(), torch.ones(2, 8, dtype=torch.int64), "expected a floating-point tensor, got torch.int64"),
        (Activation("relu"), torch.ones(2, dtype=torch.bool), "expected a floating-point tensor, got torch.bool"),
    ],
)
def test_call_error(op, x, message):
    with pytest.raises(ArgumentError, match=message):
        op(x)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (SwiGLU(), "SwiGLU(silu)"),
        (Activation("relu2"), "Activation(relu2)"),
        (ClampedSwiGLU(), "ClampedSwiGLU(silu, limit=7.0, alpha=1.702, linear_offset=1.0)"),
        (SwiGLU(layout=interleaved(32)), "SwiGLU(silu, block=32)"),
    ],
)
def test_repr_says_what_is_not_the_default(op, text):
    assert repr(op) == text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [7.0, 0.4])
def test_numbers_on_the_limit_are_not_clamped(limit, dtype):
    """Their gradients pass, those of the next numbers do not: as of 2.13's ``clamp``, which rounds a limit first."""
    wide = torch.promote_types(dtype, torch.float32)
    edge = torch.tensor(limit, dtype=dtype)
    near = torch.stack([torch.nextafter(edge, edge * 0), edge, torch.nextafter(edge, edge.new_tensor(torch.inf))])
    near = torch.cat([near, -near])
    x = torch.cat([near, near]).unsqueeze(0).requires_grad_()
    truth = x.detach().to(wide).requires_grad_()
    gate, up = truth.chunk(2, -1)
    clamped = -at_most(limit, -at_most(limit, up))
    (torch.nn.functional.silu(at_most(limit, gate)) * clamped).sum().backward()
    GLU("silu", limit=limit)(x).sum().backward()

    assert torch.equal(x.grad.eq(0), truth.grad.to(dtype).eq(0))
    torch.testing.assert_close(x.grad, truth.grad.to(dtype), equal_nan=True)
