"""The ops without groups: Scale, ConstantScale, Bias, Identity, branches, Linear, composites."""

from __future__ import annotations

import pytest
import torch
from reference import assert_as_good, assert_same, glu, run, scale, unit
from torch import nn
from torch.nn import functional as F

from fusible import (
    Activation,
    AddExtraInput,
    ArgumentError,
    Bias,
    ConstantScale,
    Identity,
    Linear,
    MakeExtraOutput,
    Scale,
    ScaledActivation,
    ScaledClampedSwiGLU,
    ScaledSwiGLU,
    Sequential,
    SwapExtra,
    SwiGLU,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALF = torch.bfloat16


def kept_by(function):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return kept


@pytest.mark.parametrize("scales_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale(dtype, scales_dtype):
    tensors, dy = {"x": unit(9, 6, dtype=dtype), "scales": unit(9, dtype=scales_dtype)}, unit(9, 6, dtype=dtype)

    assert_as_good(run(Scale(), tensors, dy), scale, tensors, dy)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (0, 6), (2, 0, 6)])
def test_scale_takes_any_leading_dims(shape):
    tensors, dy = {"x": unit(*shape), "scales": unit(*shape[:-1])}, unit(*shape)

    assert_as_good(run(Scale(), tensors, dy), scale, tensors, dy)


def test_wide_scales_are_not_rounded_first():
    x, scales = unit(64, 8, dtype=HALF, grad=False), unit(64, dtype=torch.float32, grad=False)

    assert torch.equal(Scale()(x, scales=scales), (x.float() * scales[:, None]).to(HALF))


def test_products_are_not_rounded_before_they_are_summed_for_the_scales():
    x, dy = torch.tensor([[1 + 2**-7, 1 + 2**-6]], dtype=HALF), torch.tensor([[1 + 2**-7, -1]], dtype=HALF)
    scales = torch.ones(1, dtype=HALF, requires_grad=True)
    Scale()(x, scales=scales).backward(dy)

    assert scales.grad.tolist() == [2**-14]


def test_gradient_of_wide_scales_is_summed_wide():
    x, scales, dy = unit(8, 512, dtype=HALF, grad=False), unit(8, dtype=torch.float32), unit(8, 512, dtype=HALF)
    grads = run(Scale(), {"x": x, "scales": scales}, dy)

    torch.testing.assert_close(grads["scales"], (dy.float() * x.float()).sum(1).detach(), rtol=1e-5, atol=1e-5)
    assert grads["scales"].dtype == torch.float32


def test_scale_gradcheck():
    assert torch.autograd.gradcheck(lambda x, s: Scale()(x, scales=s), (unit(4, 3), unit(4)))


@pytest.mark.parametrize("frozen", ["x", "scales"])
def test_scale_with_a_frozen_input(frozen):
    tensors, dy = {"x": unit(4, 3, grad=frozen != "x"), "scales": unit(4, grad=frozen != "scales")}, unit(4, 3)

    assert_as_good(run(Scale(), tensors, dy), scale, tensors, dy)


def test_scale_keeps_x_only_for_the_gradient_of_scales():
    x, scales = unit(4, 3), unit(4, grad=False)
    kept = kept_by(lambda: Scale()(x, scales=scales))

    assert [t.shape for t in kept] == [scales.shape]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (torch.ones(3), r"scales: expected shape \[4\], one number a row, got \[3\]"),
        (torch.ones(4).to(torch.float8_e5m2), r"scales: expected a floating-point .*, got torch.float8_e5m2"),
        (torch.ones(4, 1), r"scales: expected shape \[4\], one number a row, got \[4, 1\]"),
        (torch.ones(4, dtype=torch.int64), r"floating-point tensor of shape \[4\], got torch.int64 of shape \[4\]"),
        (2.0, r"scales: expected a floating-point tensor of shape \[4\], got a float"),
        (torch.ones(4, device="meta"), "scales: expected a tensor on cpu, where x is, got one on meta"),
    ],
)
def test_scale_error(scales, message):
    with pytest.raises(ArgumentError, match=message):
        Scale()(torch.ones(4, 3), scales=scales)


@pytest.mark.parametrize("op", [Scale(), Bias(3), SwiGLU(), Activation("relu")], ids=lambda op: type(op).__name__)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, 3, dtype=torch.int64), "x: expected a floating-point tensor, got torch.int64"),
        (torch.tensor(1.0), "x: expected at least 1 dimension, got a single number"),
    ],
)
def test_what_is_no_row_of_floats_is_refused(op, x, message):
    keywords = {"scales": torch.ones(x.shape[:-1])} if "scales" in op.keywords else {}

    with pytest.raises(ArgumentError, match=message):
        op(x, **keywords)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1, 0, -2.5, 3.5])
@pytest.mark.parametrize("shape", [(), (1, 13), (4, 4, 2)])
def test_constant_scale(shape, factor, dtype):
    tensors, dy = {"x": unit(*shape, dtype=dtype)}, unit(*shape, dtype=dtype)

    assert_same(
        run(ConstantScale(factor), tensors, dy), {"y": tensors["x"].detach() * factor, "x": dy.detach() * factor}
    )


def test_constant_scale_gradcheck():
    assert torch.autograd.gradcheck(ConstantScale(-2.5), unit(3, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 3, 8, 7), (0, 7)])
def test_bias(shape, dtype):
    op, dy = Bias(7, dtype=dtype), unit(*shape, dtype=dtype)
    nn.init.normal_(op.bias)
    tensors = {"x": unit(*shape, dtype=dtype), "bias": op.bias}
    ours = run(lambda x, bias: op(x), tensors, dy)

    assert_as_good(ours, lambda x, bias: x + bias, tensors, dy)


def test_bias_starts_at_zero():
    assert Bias(3).bias.tolist() == [0, 0, 0]


def test_bias_keeps_the_dtype_of_x():
    assert Bias(3)(torch.ones(2, 3, dtype=HALF)).dtype == HALF


def test_gradient_of_a_wide_bias_is_not_rounded_to_the_dtype_of_x():
    op, dy = Bias(1), torch.tensor([[256.0], [1.0]], dtype=HALF)
    op(torch.ones(2, 1, dtype=HALF)).backward(dy)

    assert op.bias.grad.tolist() == [257]


def test_bias_gradcheck():
    op = Bias(3, dtype=torch.float64)

    assert torch.autograd.gradcheck(lambda x, _: op(x), (unit(4, 3), op.bias))


def test_frozen_bias_costs_no_sum():
    op, x = Bias(3).requires_grad_(False), unit(2, 3, dtype=torch.float32)
    op(x).sum().backward()

    assert op.bias.grad is None
    assert x.grad.eq(1).all()


def test_bias_errors():
    with pytest.raises(ValueError, match="Bias: features must be at least 1, got 0"):
        Bias(0)
    with pytest.raises(ArgumentError, match=r"expected 3 features in the last dimension, got shape \[2, 4\]"):
        Bias(3)(torch.ones(2, 4))


def test_identity_passes_x_and_dy():
    x, dy = unit(3, 4), unit(3, 4)

    assert_same(run(Identity(), {"x": x}, dy), {"y": x.detach(), "x": dy.detach()})


@pytest.mark.parametrize("op", [Identity(), Bias(4), ConstantScale(2.0), MakeExtraOutput(), AddExtraInput("more")])
def test_op_on_meta(op):
    x = torch.empty(3, 4, device="meta")
    y = op.to("meta")(x, **dict.fromkeys(op.keywords, x))

    assert (y[0] if isinstance(y, tuple) else y).shape == (3, 4)


def test_extra_output_and_input_close_a_residual():
    inner = Linear(4, 4, dtype=torch.float64)
    model = Sequential(MakeExtraOutput("skip"), inner, AddExtraInput("skip"))
    tensors, dy = {"x": unit(3, 4), "w": inner.weight, "b": inner.bias}, unit(3, 4)
    ours = run(lambda x, w, b: model(x), tensors, dy)

    assert_as_good(ours, lambda x, w, b: F.linear(x, w, b) + x, tensors, dy)


def test_extra_output_alone_returns_both():
    x = unit(3, 4)
    y, extra = MakeExtraOutput("skip")(x)
    (y + 2 * extra).sum().backward()

    assert torch.equal(y, extra)
    assert x.grad.eq(3).all()


def test_extra_output_that_is_made_without_grad_requires_none():
    with torch.no_grad():
        _, extra = MakeExtraOutput("r")(unit(3, 4))

    assert not extra.requires_grad


def test_extra_output_gradcheck():
    assert torch.autograd.gradcheck(lambda x: sum(MakeExtraOutput()(x)), unit(3, 4))


def test_unread_extra_output_has_no_gradient_to_add():
    x = unit(3, 4)
    MakeExtraOutput()(x)[0].sum().backward()

    assert x.grad.eq(1).all()


def test_a_second_branch_begins_at_a_kept_tensor():
    first, second = Linear(4, 6, dtype=torch.float64), Linear(4, 6, dtype=torch.float64)
    ops = [MakeExtraOutput("x0"), first, SwapExtra("x0", "first"), second, AddExtraInput("first")]
    tensors, dy = {"x": unit(3, 4), "v": first.weight, "w": second.weight}, unit(3, 6)
    ours = run(lambda x, v, w: Sequential(*ops)(x), tensors, dy)
    biases = first.bias.detach() + second.bias.detach()

    assert_as_good(ours, lambda x, v, w: F.linear(x, v) + F.linear(x, w, biases), tensors, dy)


def test_swapped_tensors_may_have_any_form():
    x, kept = unit(3), unit(2, 5)
    assert torch.autograd.gradcheck(lambda x, kept: SwapExtra("kept", "x0")(x, kept=kept), (x, kept))

    y, x0 = SwapExtra("kept", "x0")(x, kept=torch.ones(2, dtype=torch.int64))
    assert y.tolist() == [1, 1]
    assert torch.equal(x0, x)


def test_swap_says_what_does_not_fit():
    with pytest.raises(
        ValueError, match="SwapExtra: the extra output needs another name than the keyword, got 'a' twice"
    ):
        SwapExtra("a", "a")
    with pytest.raises(ValueError, match="SwapExtra: the name must be an identifier"):
        SwapExtra("a", "y")
    with pytest.raises(ArgumentError, match="a: expected a tensor, got a float"):
        SwapExtra("a", "b")(torch.ones(2), a=1.0)


def test_extra_input_keeps_the_dtype_of_x():
    x, more = unit(3, 4, dtype=HALF), unit(3, 4, dtype=torch.float32)
    grads = run(AddExtraInput("more"), {"x": x, "more": more}, unit(3, 4, dtype=HALF))

    assert [grads[k].dtype for k in ("y", "x", "more")] == [HALF, HALF, torch.float32]


def test_extra_input_gradcheck():
    assert torch.autograd.gradcheck(lambda x, more: AddExtraInput("more")(x, more=more), (unit(3, 4), unit(3, 4)))


def test_gradients_of_both_summands_are_separate_tensors():
    x, more = unit(3, 4), unit(3, 4)
    AddExtraInput("more")(x, more=more).sum().backward()
    x.grad.zero_()

    assert more.grad.eq(1).all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (torch.ones(3), r"of shape \[2, 3\], like x, got \[3\]"),
        (1.0, r"of shape \[2, 3\], like x, got float"),
        (torch.ones(2, 3, device="meta"), "on cpu, where x is, got one on meta"),
    ],
)
def test_extra_input_error(more, message):
    with pytest.raises(ArgumentError, match="more: expected a tensor " + message):
        AddExtraInput("more")(torch.ones(2, 3), more=more)


@pytest.mark.parametrize("scale", ["a", "2", None, [2.0], True, float("inf")])
def test_a_constant_that_is_no_number_is_named(scale):
    with pytest.raises(ValueError, match="ConstantScale: scale must be a finite number, got"):
        ConstantScale(scale)


@pytest.mark.parametrize("after", [ConstantScale(1.0), Activation("sigmoid")], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_numbers_that_are_no_floats_are_added_and_get_no_gradient(kind, after):
    x, more = torch.randn(2, 3, requires_grad=True), torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=kind)
    y, expected = Sequential(AddExtraInput("more"), after)(x, more=more), after(x + more)
    grads = [torch.autograd.grad(each.sum(), x)[0] for each in (y, expected)]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("op", [AddExtraInput, MakeExtraOutput])
@pytest.mark.parametrize("name", ["not a name", "", 3])
def test_branch_name_must_be_an_identifier(op, name):
    with pytest.raises(ValueError, match=f"{op.__name__}: the name must be an identifier.* got {name!r}"):
        op(name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (0, 6), (6,)])
def test_linear(shape, bias, dtype):
    op, dy = Linear(6, 4, bias=bias, dtype=dtype), unit(*shape[:-1], 4, dtype=dtype)
    tensors = {"x": unit(*shape, dtype=dtype), **dict(op.named_parameters())}
    ours = run(lambda x, **_: op(x), tensors, dy)

    assert_as_good(ours, lambda x, weight, bias=None: F.linear(x, weight, bias), tensors, dy)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_linear_with_something_frozen(frozen):
    op, dy = Linear(6, 4, dtype=torch.float64), unit(5, 4)
    tensors = {"x": unit(5, 6), **dict(op.named_parameters())}
    tensors[frozen].requires_grad_(False)
    ours = run(lambda x, **_: op(x), tensors, dy)

    assert_as_good(ours, lambda x, weight, bias: F.linear(x, weight, bias), tensors, dy)


def test_linear_saves_nothing_for_what_is_frozen():
    op, x = Linear(6, 4), unit(5, 6, dtype=torch.float32)
    op.weight.requires_grad_(False)
    kept = kept_by(lambda: op(x))

    assert [t.data_ptr() for t in kept] == [op.weight.data_ptr()]


def test_linear_gradcheck():
    op = Linear(3, 2, dtype=torch.float64)

    assert torch.autograd.gradcheck(lambda x, *_: op(x), (unit(4, 3), op.weight, op.bias))


def test_linear_of_strided_and_expanded_dy():
    op, x = Linear(3, 2, dtype=torch.float64), unit(4, 3)
    for dy in (unit(2, 4, grad=False).mT, unit(2, grad=False).expand(4, 2)):
        assert_same(*(torch.autograd.grad(op(x), [x, op.weight], d) for d in (dy, dy.clone())))


def test_linear_under_autocast():
    op, x = Linear(6, 4), unit(5, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)
    y.sum().backward()

    assert y.dtype == torch.bfloat16
    assert (x.grad.dtype, op.weight.grad.dtype, op.bias.grad.dtype) == (torch.float32,) * 3


def test_linear_keeps_float64_under_autocast():
    op, x = Linear(6, 4, dtype=torch.float64), unit(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)

    torch.testing.assert_close(y, op(x))


def test_linear_draws_as_torch_does():
    op = Linear(64, 32)

    assert op.weight.abs().max() <= 1 / 8
    assert op.weight.std() > 0.06


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_of_a_vector_in_a_container(autocast):
    model, x = Sequential(Linear(6, 4), Bias(4), SwiGLU(), Linear(2, 3)), unit(6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        vector, matrix = model(x), model(x.unsqueeze(0))

    assert vector.shape == (3,)
    torch.testing.assert_close(vector, matrix[0])
    assert model.explain(x).rows == 1
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (vector, matrix)))


def test_linear_errors():
    with pytest.raises(ValueError, match="Linear: in_features must be at least 1, got 0"):
        Linear(0, 4)
    with pytest.raises(ArgumentError, match=r"expected 6 features in the last dimension, got shape \[2, 5\]"):
        Linear(6, 4)(torch.ones(2, 5))
    with pytest.raises(ArgumentError, match=r"expected 6 features in the last dimension, got shape \[\]"):
        Linear(6, 4)(torch.ones(()))
    with pytest.raises(ArgumentError, match=r"expected torch.float32, the dtype of the weight, got torch.bfloat16"):
        Linear(6, 4)(torch.ones(2, 6, dtype=HALF))
    with pytest.raises(ArgumentError, match="expected a tensor on cpu, where the weight is, got one on meta"):
        Linear(6, 4)(torch.ones(2, 6, device="meta"))


COMPOSITES = [
    (ScaledSwiGLU(), glu("silu")),
    (ScaledClampedSwiGLU(), glu("silu", limit=7.0, alpha=1.702, linear_offset=1.0)),
    (ScaledClampedSwiGLU(limit=0.5, alpha=2.0, linear_offset=0.0), glu("silu", limit=0.5, alpha=2.0)),
    (ScaledActivation("relu2"), lambda x: torch.relu(x) ** 2),
]


@pytest.mark.parametrize("contained", [False, True])
@pytest.mark.parametrize(("op", "act"), COMPOSITES)
def test_composite(op, act, contained):
    tensors = {"x": unit(5, 8, dtype=HALF), "scales": unit(5, dtype=torch.float32)}
    dy = unit(*act(tensors["x"]).shape, dtype=HALF)
    ours = run(Sequential(op) if contained else op, tensors, dy)

    assert_as_good(ours, lambda x, scales: scale(act(x), scales), tensors, dy)


@pytest.mark.parametrize("op", [op for op, _ in COMPOSITES])
def test_composite_gradcheck(op):
    assert torch.autograd.gradcheck(lambda x, s: op(x, scales=s), (unit(3, 4), unit(3)))


@pytest.mark.parametrize("frozen", ["x", "scales"])
def test_composite_with_a_frozen_input(frozen):
    tensors = {"x": unit(5, 8, grad=frozen != "x"), "scales": unit(5, grad=frozen != "scales")}
    dy = unit(5, 4)

    assert_as_good(run(ScaledSwiGLU(), tensors, dy), lambda x, scales: scale(glu("silu")(x), scales), tensors, dy)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [(Linear(4, 4), {}), (Bias(4), {}), (ConstantScale(2), {}), (Scale(), {"scales": torch.ones(3)})],
)
def test_no_graph_under_no_grad(op, arguments):
    x = unit(3, 4, dtype=torch.float32)
    with torch.no_grad():
        y = op(x, **arguments)

    assert not y.requires_grad


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (ConstantScale(2), "ConstantScale(2.0)"),
        (Bias(3), "Bias(3)"),
        (MakeExtraOutput("skip"), "MakeExtraOutput('skip')"),
        (AddExtraInput("skip"), "AddExtraInput('skip')"),
        (SwapExtra("skip", "other"), "SwapExtra('skip', 'other')"),
        (Linear(3, 2, bias=False), "Linear(3, 2, bias=False)"),
    ],
)
def test_repr(op, text):
    assert repr(op) == text


def test_constant_scale_of_whole_numbers_gives_floating_point_ones():
    y = Sequential(ConstantScale(0.5), Bias(3))(torch.ones(2, 3, dtype=torch.int64))

    assert torch.equal(y, torch.full((2, 3), 0.5))


@pytest.mark.parametrize(("x", "extra"), [(torch.int64, torch.float32), (torch.float32, torch.complex64)])
def test_an_extra_input_that_would_lose_a_part_is_refused(x, extra):
    with pytest.raises(ArgumentError, match=f"r: {extra} cannot be added to x, of {x}"):
        AddExtraInput("r")(torch.ones(2, 3).to(x), r=torch.ones(2, 3).to(extra))
