"""A grouped linear with a recipe: its numbers are those of products of the quantised copies, whatever calls it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusible
from fusible.ops import kernels
from fusible.ops.formats import reference
from fusible.ops.formats.copies import BLOCK
from fusible.ops.grouped.grouped_linear import LinearCall

E, K, N = 3, 160, 272
SIZES = (70, 0, 200)
RECIPE = fusible.Float8Block()


def tokens(rows=300, columns=K, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def linear(recipe=RECIPE, dtype=torch.bfloat16, **options):
    torch.manual_seed(1)
    return fusible.GroupedLinear(E, K, N, dtype=dtype, recipe=recipe, **options)


def like(op, **options):
    """Another op with the same parameters."""
    other = linear(**options)
    other.load_state_dict(op.state_dict())
    return other


def run(op, x=None, dy=None, sizes=SIZES, **keywords):
    """The output and the gradients of x and of the parameters."""
    x = (tokens() if x is None else x).clone().requires_grad_()
    y = op(x, split_sizes=torch.tensor(sizes), **keywords)
    y.backward(tokens(y.shape[0], N, y.dtype, seed=2) if dy is None else dy)
    return y.detach(), x.grad, {name: p.grad for name, p in op.named_parameters()}


def far(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def groups(sizes=SIZES):
    start = 0
    for g, size in enumerate(sizes):
        yield g, slice(start, start + size)
        start += size


@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
def test_products_are_those_of_the_dequantised_copies(scales):
    op = linear(fusible.Float8Block(scales=scales), bias=False)
    x, dy, is_power = tokens(), tokens(300, N, seed=2), scales == "power_of_two"
    y, dx, grads = run(op, x, dy)

    rows = reference.dequantize_rows(reference.quantize_rows(x, is_power))
    drows = reference.dequantize_rows(reference.quantize_rows(dy, is_power))
    weight = reference.dequantize_weight(reference.quantize_weight(op.weight.detach(), 1, is_power), 1)
    assert not grads["weight"][1].any()
    for g, part in groups():
        if not SIZES[g]:
            continue
        torch.testing.assert_close(y[part], (rows[part] @ weight[g].mT).bfloat16(), rtol=0.01, atol=1e-5)
        torch.testing.assert_close(dx[part], (drows[part] @ weight[g]).bfloat16(), rtol=0.01, atol=1e-5)
        parts = [block(t[part], is_power) for t in (dy, x)]
        torch.testing.assert_close(grads["weight"][g], (parts[0].mT @ parts[1]).bfloat16(), rtol=0.01, atol=1e-4)
    assert not y[270:].any()
    assert not dx[270:].any()


def block(rows, is_power_of_two):
    """The rows of one group, quantised by columns in blocks of 128 and dequantised."""
    parts = [reference.quantize_blocks(part, (0,), is_power_of_two) for part in rows.split(BLOCK)]
    return torch.cat([data.float() * scales for data, scales in parts])


def test_results_are_close_to_those_of_16_bits():
    op = linear()
    quantised, exact = run(op), run(like(op, recipe=None))

    for ours, theirs in zip((*quantised[:2], quantised[2]["weight"]), (*exact[:2], exact[2]["weight"]), strict=True):
        assert 0.01 < far(ours[:270], theirs[:270]) < 0.05
    assert torch.equal(quantised[2]["bias"], exact[2]["bias"])


def assert_equal(a, b):
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert a[2].keys() == b[2].keys()
    for name in a[2]:
        assert torch.equal(a[2][name], b[2][name]), name


def test_a_configured_recipe_counts_where_an_op_has_none():
    op = linear(None)
    exact = run(op)
    op.zero_grad()
    with fusible.config(recipe=RECIPE):
        configured = run(op)
        never = run(like(op, recipe=fusible.NoRecipe()))
        with fusible.config(recipe=fusible.NoRecipe()):
            off = run(like(op, recipe=None))

    assert_equal(configured, run(like(op)))
    assert_equal(never, exact)
    assert_equal(off, exact)


def test_the_backward_follows_the_recipe_of_its_forward():
    op = linear(None)
    x = tokens().requires_grad_()
    with fusible.config(recipe=RECIPE):
        y = op(x, split_sizes=torch.tensor(SIZES))
    y.backward(tokens(300, N, seed=2))

    assert torch.equal(x.grad, run(like(op))[1])


def test_the_recipe_of_an_op_may_change_between_calls():
    op = linear(None)
    exact = run(op)
    op.zero_grad()
    op.recipe = RECIPE

    assert_equal(run(op), run(like(op)))
    assert not torch.equal(run(op)[0], exact[0])


@pytest.mark.parametrize("recipe", ["float8", fusible.Float8Block, 8])
def test_what_is_no_recipe_is_refused(recipe):
    with pytest.raises(fusible.ArgumentError, match=r"recipe must be one such as fusible.Float8Block\(\)"):
        fusible.GroupedLinear(E, K, N, recipe=recipe)
    with (
        pytest.raises(ValueError, match=r"recipe must be one such as fusible.Float8Block\(\)"),
        fusible.config(recipe=recipe),
    ):
        pass


@pytest.mark.parametrize(
    ("recipe", "dtype", "why"),
    [
        (RECIPE, torch.float32, "Float8Block quantises bfloat16 or float16, not float32"),
        (fusible.MXFP8(), torch.float32, "MXFP8 quantises bfloat16 or float16, not float32"),
    ],
)
def test_what_is_not_followed_says_why(recipe, dtype, why):
    op, x = linear(recipe, dtype), tokens(dtype=dtype)
    sizes = torch.tensor(SIZES)

    assert any(why in note for note in fusible.explain(op, x, split_sizes=sizes).steps[0].notes)
    assert torch.equal(op(x, split_sizes=sizes), like(op, recipe=None, dtype=dtype)(x, split_sizes=sizes))
    with fusible.config(strict=True), pytest.raises(fusible.RefusedError, match=why.split("(")[0]):
        op(x, split_sizes=sizes)


def test_explain_lists_the_copies_and_the_products_with_their_bytes():
    step = fusible.explain(linear(), tokens().requires_grad_(), split_sizes=torch.tensor(SIZES)).steps[0]
    forward, backward = step.configurations, step.backward.configurations

    assert [line.split(", ")[1] for line in forward] == ["rows rows+columns", "weight both", "NT 300 x 272 x 160"]
    assert [line.split(", ")[1] for line in backward] == [
        "rows rows+columns",
        "NT 300 x 160 x 272",
        "TN 272 x 160 x 300",
    ]
    assert all(line.endswith(" MB") for line in forward + backward)
    assert step.flops == 2 * 300 * K * N


def test_only_wanted_copies_are_made():
    def copies(**frozen):
        op = linear(bias=False)
        op.weight.requires_grad_(frozen.get("weight", True))
        x = tokens().requires_grad_(frozen.get("x", True))
        return [
            line.split(", ")[1]
            for line in fusible.explain(op, x, split_sizes=torch.tensor(SIZES)).steps[0].configurations
        ]

    assert copies() == ["rows rows+columns", "weight both", "NT 300 x 272 x 160"]
    assert copies(weight=False) == ["rows rows", "weight both", "NT 300 x 272 x 160"]
    assert copies(x=False) == ["rows rows+columns", "weight rows", "NT 300 x 272 x 160"]
    with torch.no_grad():
        assert copies() == ["rows rows", "weight rows", "NT 300 x 272 x 160"]


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_parts_leave_the_other_gradient_as_it_is(frozen):
    op, whole = linear(bias=False), run(linear(bias=False))
    x = tokens().requires_grad_(frozen != "x")
    op.weight.requires_grad_(frozen != "weight")
    op(x, split_sizes=torch.tensor(SIZES)).backward(tokens(300, N, seed=2))

    assert torch.equal(op.weight.grad, whole[2]["weight"]) if frozen == "x" else torch.equal(x.grad, whole[1])
    assert (x.grad if frozen == "x" else op.weight.grad) is None


def test_weight_gradients_of_16_bits_are_products_of_what_was_not_quantised():
    op = linear(fusible.Float8Block(wgrad="bfloat16"))
    y, dx, grads = run(op)
    exact, float8 = run(like(op, recipe=None)), run(like(op))

    assert torch.equal(grads["weight"], exact[2]["weight"])
    assert torch.equal(dx, float8[1])
    assert torch.equal(y, float8[0])


@pytest.mark.parametrize(
    "options", [{"single_grouped_weight": False}, {"transposed_weight": True}, {"single_grouped_bias": False}]
)
def test_a_weight_gives_the_same_numbers_as_it_is_stored(options):
    op, other = linear(), linear(**options)
    with torch.no_grad():
        for to, source in ((other.matrices("weight"), op.weight), (other.matrices("bias"), op.bias)):
            for g in range(E):
                to[g].copy_(source[g])
    y, dx, grads = run(other)
    expected = run(op)

    assert torch.equal(y, expected[0])
    assert torch.equal(dx, expected[1])
    weight = grads["weight"] if "weight" in grads else torch.stack([grads[f"weight{g}"] for g in range(E)])
    assert torch.equal(weight.mT if other.transposed_weight else weight, expected[2]["weight"])


def test_buffers_of_the_caller_hold_the_results_and_keep_their_tails():
    op, expected = linear(), run(linear())
    output, grad_input = torch.full((300, N), 7.0).bfloat16(), torch.full((300, K), 7.0).bfloat16()
    y, dx, _ = run(op, output=output, grad_input=grad_input)

    assert y.data_ptr() == output.data_ptr()
    assert torch.equal(y[:270], expected[0][:270])
    assert torch.equal(grad_input[:270], expected[1][:270])
    assert (output[270:] == 7).all()
    assert (grad_input[270:] == 7).all()
    assert torch.equal(dx[:270], expected[1][:270])


def test_a_tail_of_nans_reaches_nothing():
    x, dy = tokens(), tokens(300, N, seed=2)
    clean = run(linear(), x, dy)
    x[270:], dy[270:] = torch.nan, torch.nan

    assert_equal(run(linear(), x, dy), clean)


def test_nans_of_a_group_stay_in_it():
    x, dy = tokens(), tokens(300, N, seed=2)
    clean = run(linear(), x, dy)
    x[3, 5], dy[4, 6] = torch.nan, torch.inf
    y, dx, grads = run(linear(), x, dy)

    assert y[3].isnan().all()
    assert dx[4].isnan().all()
    assert torch.equal(y[70:], clean[0][70:])
    assert torch.equal(dx[70:], clean[1][70:])
    assert torch.equal(grads["weight"][1:], clean[2]["weight"][1:])
    assert grads["weight"][0, 6].isnan().all()


def test_the_scale_of_a_bias():
    op = linear(scale_bias=True)
    factors = tokens(300, 1, torch.float32, seed=4).squeeze(1)
    scale = factors.clone().requires_grad_()
    y, dx, grads = run(op, bias_scale=scale)
    plain, exact_scale = like(op, bias=True), factors.clone().requires_grad_()
    exact = run(like(op, recipe=None, scale_bias=True), bias_scale=exact_scale)
    unbiased = plain.bias.data.zero_()

    assert not unbiased.any()
    assert torch.equal(dx, run(plain)[1])
    assert torch.equal(grads["bias"], exact[2]["bias"])
    assert torch.equal(scale.grad, exact_scale.grad)
    assert far(y[:270], exact[0][:270]) < 0.05


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
def test_main_grads_are_added_to(single, delayed):
    options = {"single_grouped_weight": single, "accumulate_into_main_grad": True, "delay_wgrad_compute": delayed}
    op = linear(**options)
    weights = [p for name, p in op.named_parameters() if name.startswith("weight")]
    for weight in weights:
        weight.main_grad = torch.ones(weight.shape)
    for _ in range(2):
        run(op)
        op.backward_dw()
    wide = like(op, dtype=torch.float32, single_grouped_weight=single)
    with torch.autocast("cpu", torch.bfloat16):
        grads = run(wide, dy=tokens(300, N, seed=2))[2]
    expected = [p for name, p in grads.items() if name.startswith("weight")]

    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.main_grad, 1 + 2 * gradient, rtol=1e-5, atol=1e-5)


def test_a_delayed_gradient_is_that_of_autograd():
    op = linear(delay_wgrad_compute=True)
    x = tokens()
    y = op(x, split_sizes=torch.tensor(SIZES))
    y.backward(tokens(300, N, seed=2))

    assert op.weight.grad is None
    x.zero_()  # the copies are kept, not the rows
    op.backward_dw()
    assert torch.equal(op.weight.grad, run(like(op))[2]["weight"])


def test_autocast_casts_the_rows_and_quantises_the_weight_as_it_is():
    op = linear(dtype=torch.float32)
    x = tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, grads = run(op, x, tokens(300, N, seed=2))

    assert y.dtype == torch.bfloat16
    assert dx.dtype == grads["weight"].dtype == torch.float32
    exact = run(like(op, dtype=torch.float32, recipe=None), x, tokens(300, N, torch.float32, seed=2))
    assert 0.01 < far(y[:270], exact[0][:270]) < 0.05
    assert far(grads["weight"], exact[2]["weight"]) < 0.05


def test_recomputation_gives_the_same_bits():
    op, expected = linear(), run(linear())
    x = tokens().requires_grad_()
    y = checkpoint(lambda x: op(x, split_sizes=torch.tensor(SIZES)), x, use_reentrant=False)
    y.backward(tokens(300, N, seed=2))

    assert torch.equal(x.grad, expected[1])
    assert torch.equal(op.weight.grad, expected[2]["weight"])


def test_copies_keep_their_recipe_and_a_state_dict_has_none():
    op = linear()

    assert copy.deepcopy(op).recipe == RECIPE
    assert pickle.loads(pickle.dumps(op)).recipe == RECIPE
    assert op.state_dict().keys() == {"weight", "bias"}
    assert "recipe=Float8Block(" in repr(op)
    assert "recipe" not in repr(linear(None))


@pytest.mark.parametrize("rows", [0, 5])
def test_calls_without_rows_of_a_group(rows):
    x = tokens(rows)
    y, dx, grads = run(linear(), x, tokens(rows, N, seed=2), sizes=(0, 0, 0))

    assert y.shape == (rows, N)
    assert not y.any()
    assert not dx.any()
    assert not grads["weight"].any()


def test_a_power_of_two_goes_through():
    x, expected = tokens(), run(linear(bias=False))
    y, dx, grads = run(linear(bias=False), x * 2.0**-9)

    assert torch.equal(y, expected[0] * 2.0**-9)
    assert torch.equal(dx, expected[1])
    assert torch.equal(grads["weight"], expected[2]["weight"] * 2.0**-9)


def test_a_group_depends_on_no_other():
    x, dy = tokens(), tokens(300, N, seed=2)
    y, dx, grads = run(linear(), x, dy)
    alone = run(linear(), x[70:270], dy[70:270], sizes=(0, 0, 200))

    assert torch.equal(alone[0], y[70:270])
    assert torch.equal(alone[1], dx[70:270])
    assert torch.equal(alone[2]["weight"][2], grads["weight"][2])


@pytest.mark.parametrize("configured", [True, False])
def test_compiled_code_gives_the_same_bits(configured):
    op, expected = linear(None if configured else RECIPE), run(linear())
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    x = tokens().requires_grad_()
    with fusible.config(recipe=RECIPE if configured else None):
        y = compiled(x, split_sizes=torch.tensor(SIZES))
    y.backward(tokens(300, N, seed=2))

    assert torch.equal(y, expected[0])
    assert torch.equal(x.grad, expected[1])
    assert torch.equal(op.weight.grad, expected[2]["weight"])


def test_compiled_code_sees_another_recipe():
    op = linear(None)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    x, sizes = tokens(), torch.tensor(SIZES)
    results = []
    for recipe in (None, RECIPE, fusible.Float8Block(scales="float32"), fusible.NoRecipe()):
        with fusible.config(recipe=recipe):
            results.append((compiled(x, split_sizes=sizes), op(x, split_sizes=sizes)))

    for compiled_y, y in results:
        assert torch.equal(compiled_y, y)
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][0], results[3][0])


@pytest.mark.parametrize("recipe", [RECIPE, fusible.MXFP8(), fusible.NVFP4()], ids=repr)
def test_rows_are_sent_to_slots_once_they_are_complete(recipe, monkeypatch):
    """A product that stores to slots leaves its result unwritten, which would be sent over what it stored."""
    sent = []
    monkeypatch.setattr(kernels, "send_rows", lambda rows, slots: sent.append((rows.clone(), slots)))
    op = linear(recipe)
    slots = kernels.RowSlots(0, [0], *(torch.zeros(1),) * 3, 0, 0)
    call = LinearCall(torch.tensor(SIZES), frozenset())
    with torch.no_grad():
        y, _ = op.multiply(op.reads(tokens(), call, None), call, slots=slots)

    assert len(sent) == 1
    assert sent[0][1] is slots
    assert torch.equal(sent[0][0], run(linear(recipe))[0])
    assert torch.equal(y, sent[0][0])
