"""Linears and experts under every recipe: products of the copies, fused as op by op, whatever is frozen or lent."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from checks import recipes
from checks.recipes import assert_equal, far, tensor
from torch.utils.checkpoint import checkpoint

import fusible
from fusible.ops import quantized_products
from fusible.ops.formats.recipe import Recipe
from fusible.ops.kernels.doors import dequantized
from fusible.ops.kernels.problems.quantized import ScaledGemm, ScaledWgrad
from fusible.ops.kernels.pytorch import scaled_gemm as loop

E, K, N = 3, 160, 272
SIZES = (70, 0, 200)
T = 300
RECIPES: dict[str, Recipe] = {name: recipe for name, recipe in recipes.ALL.items() if name != "delayed"} | {
    "tensor power of two": fusible.Float8Tensor(scales="power_of_two"),
    "NVFP4 without a transform": fusible.NVFP4(stochastic_rounding=False, hadamard=False),
}
DELAYED = recipes.ALL["delayed"]
ALL = RECIPES | {"delayed": DELAYED, "NVFP4 stochastic": fusible.NVFP4()}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
every_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL.keys())
UNFUSED = {"GroupedMLP", "GroupedLinearGLU", "RoutedMLP"}


def linear(recipe, **options):
    torch.manual_seed(1)
    return fusible.GroupedLinear(E, K, N, **{"dtype": torch.bfloat16, "bias": False, "recipe": recipe, **options})


def run(op, sizes=SIZES, x=None, dy=None, **keywords):
    """The output and the gradients of x and of the parameters."""
    torch.manual_seed(7)  # of stochastic rounding
    x = (tensor(T, K) if x is None else x).clone().requires_grad_()
    y = op(x, split_sizes=torch.tensor(sizes), **keywords)
    y.backward(tensor(T, y.shape[1], seed=2).to(y.dtype) if dy is None else dy)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in op.named_parameters() if p.grad is not None}}


def exact_products(recipe, x, dy, weight):
    """y, dx and dW of the dequantised copies, in float64."""
    sizes = torch.tensor(SIZES)
    quantize = fusible.QuantizedGroupedTensor.quantize
    wide = {"dtype": torch.float32}
    rows, drows, w = (
        quantize(x, recipe, sizes, columnwise=True),
        quantize(dy, recipe, sizes, columnwise=True, is_gradient=True),
        quantize(weight, recipe, columnwise=True),
    )
    a, da = (t.dequantize(**wide, columnwise=False).double() for t in (rows, drows))
    ac, dac = (t.dequantize(**wide, columnwise=True).double() for t in (rows, drows))
    wr, wc = (w.dequantize(**wide, columnwise=columnwise).double() for columnwise in (False, True))
    if getattr(recipe, "wgrad", "float8") == "bfloat16":
        ac, dac = x.double(), dy.double()
    y, dx, dw = torch.zeros(T, N).double(), torch.zeros(T, K).double(), torch.zeros(E, N, K).double()
    start = 0
    for g, size in enumerate(SIZES):
        part = slice(start, start := start + size)
        y[part], dx[part], dw[g] = a[part] @ wr[g].mT, da[part] @ wc[g], dac[part].mT @ ac[part]
    return y, dx, dw


@each_recipe
def test_products_are_those_of_the_dequantised_copies(recipe):
    op, x, dy = linear(recipe), tensor(T, K), tensor(T, N, seed=2)
    x[:, 3], dy[:, 5] = x[:, 3] * 30, dy[:, 5] * 1e-3
    result = run(op, x=x, dy=dy)
    expected = exact_products(recipe, x, dy, op.weight.detach())

    for ours, theirs in zip((result["y"], result["x"], result["weight"]), expected, strict=True):
        assert far(ours, theirs) < 0.003  # of a rounding to bfloat16
    assert not result["y"][270:].any()
    assert not result["x"][270:].any()
    assert not result["weight"][1].any()


@every_recipe
def test_results_are_close_to_those_of_16_bits(recipe):
    ours, theirs = run(linear(recipe)), run(linear(None))
    bound = 0.18 if isinstance(recipe, fusible.NVFP4) else 0.07 if getattr(recipe, "gradient", "") == "e5m2" else 0.05

    for name in theirs:
        exact = name == "weight" and getattr(recipe, "wgrad", "float8") == "bfloat16"
        assert far(ours[name], theirs[name]) < bound
        assert (far(ours[name], theirs[name]) > 0.01) != exact


@every_recipe
def test_a_tail_of_nans_reaches_nothing(recipe):
    x, dy = tensor(T, K), tensor(T, N, seed=2)
    clean = run(linear(recipe), x=x, dy=dy)
    x[270:], dy[270:] = torch.nan, torch.nan

    assert_equal(run(linear(recipe), x=x, dy=dy), clean)


@each_recipe
def test_a_group_does_not_depend_on_the_others(recipe):
    x, dy = tensor(T, K), tensor(T, N, seed=2)
    whole = run(linear(recipe), x=x, dy=dy)
    x[:70], dy[:70] = 1e4, torch.nan
    other = run(linear(recipe), x=x, dy=dy)

    for name in ("y", "x"):
        assert torch.equal(other[name][70:], whole[name][70:])
    assert torch.equal(other["weight"][2], whole["weight"][2])
    assert other["x"][:70].isnan().all()
    assert other["weight"][0].isnan().all()


@every_recipe
@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 1, 0), (300, 0, 0), (0, 1, 299)])
def test_groups_of_any_size(recipe, sizes):
    ours, theirs = run(linear(recipe), sizes), run(linear(None), sizes)

    for name in theirs:
        assert ours[name].shape == theirs[name].shape
        assert far(ours[name], theirs[name]) < 0.25 or not theirs[name].any()
        assert bool(ours[name].any()) == bool(theirs[name].any())


@every_recipe
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_parts_leave_the_other_gradient_as_it_is(recipe, frozen):
    if recipe == ALL["NVFP4 stochastic"]:
        pytest.skip("draws other numbers")
    op, whole = linear(recipe), run(linear(recipe))
    x = tensor(T, K).requires_grad_(frozen != "x")
    op.weight.requires_grad_(frozen != "weight")
    op(x, split_sizes=torch.tensor(SIZES)).backward(tensor(T, N, seed=2))

    left = op.weight.grad if frozen == "x" else x.grad
    assert torch.equal(left, whole["weight" if frozen == "x" else "x"])
    assert (x.grad if frozen == "x" else op.weight.grad) is None


@each_recipe
@pytest.mark.parametrize("options", [{"single_grouped_weight": False}, {"transposed_weight": True}])
def test_a_weight_gives_the_same_numbers_as_it_is_stored(recipe, options):
    op, other = linear(recipe), linear(recipe, **options)
    with torch.no_grad():
        for target, source in zip(other.matrices("weight"), op.weight, strict=True):
            target.copy_(source)
    expected, result = run(op), run(other)
    weight = result["weight"].mT if "weight" in result else torch.stack([result[f"weight{g}"] for g in range(E)])

    assert torch.equal(result["y"], expected["y"])
    assert torch.equal(result["x"], expected["x"])
    assert torch.equal(weight, expected["weight"])


@every_recipe
def test_buffers_hold_the_results_and_keep_their_tails(recipe):
    expected = run(linear(recipe, bias=True, scale_bias=True), bias_scale=tensor(T, seed=6))
    buffers = {"output": torch.full((T, N), 7.0).bfloat16(), "grad_input": torch.full((T, K), 7.0).bfloat16()}
    run(linear(recipe, bias=True, scale_bias=True), bias_scale=tensor(T, seed=6), **buffers)

    assert torch.equal(buffers["output"][:270], expected["y"][:270])
    assert torch.equal(buffers["grad_input"][:270], expected["x"][:270])
    assert all((buffer[270:] == 7).all() for buffer in buffers.values())


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delayed", [False, True])
def test_main_grads_are_added_to_at_once_and_later(recipe, dtype, delayed):
    op, expected = linear(recipe, accumulate_into_main_grad=True, delay_wgrad_compute=delayed), run(linear(recipe))
    op.weight.main_grad = torch.ones(op.weight.shape, dtype=dtype)
    run(op)
    if delayed:
        op.backward_dw()

    assert far(op.weight.main_grad, 1 + expected["weight"].float()) < 0.005


@every_recipe
def test_delayed_weight_gradients_are_those_of_the_backward(recipe):
    op, expected = linear(recipe, delay_wgrad_compute=True), run(linear(recipe))
    run(op)
    assert op.weight.grad is None
    op.backward_dw()

    assert torch.equal(op.weight.grad, expected["weight"])


@each_recipe
def test_recomputed_forwards_have_the_same_bits(recipe):
    op, expected = linear(recipe), run(linear(recipe))
    x = tensor(T, K).requires_grad_()
    checkpoint(lambda x: op(x, split_sizes=torch.tensor(SIZES)), x, use_reentrant=False).backward(tensor(T, N, seed=2))

    assert torch.equal(x.grad, expected["x"])
    assert torch.equal(op.weight.grad, expected["weight"])


@each_recipe
def test_compiled_code_gives_the_same_bits(recipe):
    torch._dynamo.reset()
    op, expected = linear(recipe), run(linear(recipe))
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)

    assert_equal(run(compiled), {name.replace("weight", "_orig_mod.weight"): t for name, t in expected.items()})


@every_recipe
def test_weights_are_quantised_once_where_they_stay_the_same(recipe):
    op, other = linear(recipe), linear(recipe)
    expected = [run(op), run(op)]
    with fusible.same_weights():
        found = [run(other), run(other)]

    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours["y"], theirs["y"])
        assert torch.equal(ours["x"], theirs["x"])


@each_recipe
def test_autocast_quantises_what_it_casts(recipe):
    op, exact = linear(recipe, dtype=torch.float32), linear(None, dtype=torch.float32)
    x, sizes = tensor(T, K, dtype=torch.float32), torch.tensor(SIZES)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = op(x, split_sizes=sizes)
        expected = exact(x, split_sizes=sizes)

    assert y.dtype == torch.bfloat16
    assert 0.01 < far(y[:270], expected[:270]) < (0.16 if isinstance(recipe, fusible.NVFP4) else 0.05)


@each_recipe
def test_float16(recipe):
    ours, theirs = (run(linear(each, dtype=torch.float16), x=tensor(T, K).half()) for each in (recipe, None))
    bound = 0.18 if isinstance(recipe, fusible.NVFP4) else 0.07

    for name in theirs:
        assert ours[name].dtype == torch.float16
        assert far(ours[name], theirs[name]) < bound


# ---- experts


def experts(recipe, act=None, second=(), first=(), hidden=144, **options):
    torch.manual_seed(1)
    act = fusible.SwiGLU() if act is None else act
    width = 2 * hidden if isinstance(act, fusible.SwiGLU | fusible.ScaledSwiGLU) else hidden
    options = {"dtype": torch.bfloat16, "recipe": recipe, **options}
    fc1, fc2 = fusible.GroupedLinear(E, K, width, **options), fusible.GroupedLinear(E, hidden, K, **options)
    return fusible.Sequential(*first, fc1, act, fc2, *second)


def run_experts(model, config=None, **keywords):
    model.zero_grad()
    torch.manual_seed(7)
    x = tensor(T, K).requires_grad_()
    leaves = {name: k.clone().requires_grad_() for name, k in keywords.items()}
    with fusible.config(**(config or {})):
        y = model(x, split_sizes=torch.tensor(SIZES), **leaves)
    y.backward(tensor(T, K, seed=2))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **{name: leaf.grad for name, leaf in leaves.items()}, **grads}


def names(model, **keywords):
    return [
        s.name for s in model.explain(tensor(T, K).requires_grad_(), split_sizes=torch.tensor(SIZES), **keywords).steps
    ]


@every_recipe
@pytest.mark.parametrize("bias", [False, True])
def test_fused_experts_give_the_bits_of_their_ops(recipe, bias):
    model, other = experts(recipe, bias=bias), experts(recipe, bias=bias)
    assert names(model) == ["GroupedMLP"]
    assert_equal(run_experts(model), run_experts(other, {"disable_fusions": UNFUSED}))


@pytest.mark.parametrize("name", ["block", "row", "tensor", "block e5m2", "MXFP8", "NVFP4"])
def test_compiled_experts_give_the_same_bits(name):
    """Also of rows in a tail, which a kernel that is not asked to leaves as they are."""
    torch._dynamo.reset()
    keywords = {"scales": tensor(T).float()}
    model, other = (experts(RECIPES[name], fusible.ScaledSwiGLU(), bias=False) for _ in range(2))
    found = run_experts(torch.compile(model, backend="aot_eager", fullgraph=True), **keywords)

    assert_equal({name.removeprefix("_orig_mod."): t for name, t in found.items()}, run_experts(other, **keywords))


@each_recipe
def test_routed_experts_give_the_bits_of_their_ops(recipe):
    def outcome(config):
        model = experts(recipe, first=[fusible.Dispatch(E)], second=[fusible.Scale(), fusible.Combine()], bias=False)
        torch.manual_seed(7)
        x = tensor(90, K).requires_grad_()
        ids = torch.randint(0, E, (90, 2), generator=torch.Generator().manual_seed(3))
        weights = tensor(90, 2, seed=4, dtype=torch.float32).abs().requires_grad_()
        with fusible.config(**config):
            y = model(x, top_k_index=ids, top_k_weights=weights)
            shown = [step.name for step in model.explain(x, top_k_index=ids, top_k_weights=weights).steps]
        y.backward(tensor(90, K, seed=2))
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}, shown

    whole, fused = outcome({})
    parts, unfused = outcome({"disable_fusions": {"RoutedMLP"}})
    assert fused == ["RoutedMLP"]
    assert "GroupedMLP" in unfused
    assert_equal(whole, parts)


def random_experts(seed):
    """A configuration of experts, and the keywords of its call."""
    choose = random.Random(seed)
    options = {
        "bias": choose.random() < 0.5,
        "single_grouped_weight": choose.random() < 0.7,
        "transposed_weight": choose.random() < 0.3,
        "hidden": choose.choice((16, 48, 128, 144, 272)),
    }
    options["act"] = choose.choice(
        (fusible.SwiGLU(), fusible.ScaledSwiGLU(), fusible.Activation("gelu"), fusible.Activation("relu"))
    )
    recipe = choose.choice(list(RECIPES.values()))
    frozen = {name for name in ("0.weight", "2.weight", "0.bias", "2.bias") if choose.random() < 0.2}
    sizes = [choose.choice((0, 1, 5, 64, 97)) for _ in range(E)]
    scaled = isinstance(options["act"], fusible.ScaledSwiGLU)
    return recipe, options, frozen, sizes, {"scales": tensor(T, seed=seed, dtype=torch.float32).abs()} if scaled else {}


@pytest.mark.parametrize("seed", range(64))
def test_random_experts_give_the_bits_of_their_ops(seed):
    recipe, options, frozen, sizes, keywords = random_experts(seed)

    def outcome(config):
        model = experts(recipe, **copy.deepcopy(options))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(name.startswith(part) for part in frozen))
        x = tensor(T, K, seed=seed).requires_grad_(seed % 5 != 0)
        leaves = {name: k.clone().requires_grad_() for name, k in keywords.items()}
        with fusible.config(**config):
            y = model(x, split_sizes=torch.tensor(sizes), **leaves)
        if y.requires_grad:
            y.backward(tensor(T, K, seed=seed + 1))
        tensors = {"x": x, **leaves, **dict(model.named_parameters())}
        return {"y": y.detach(), **{name: t.grad for name, t in tensors.items() if t.grad is not None}}

    assert_equal(outcome({}), outcome({"disable_fusions": UNFUSED}))


# ---- scales of steps before


def test_delayed_scales_come_from_the_forwards_before():
    op, x, sizes = linear(DELAYED), tensor(T, K), torch.tensor(SIZES)
    op(8 * x, split_sizes=sizes)
    assert torch.equal(op.x_encode, torch.ones(E))
    op(x, split_sizes=sizes)

    largest = torch.stack([8 * x[:70].abs().max(), torch.zeros(()), 8 * x[70:270].abs().max()])
    assert torch.equal(op.x_encode[::2], (torch.tensor(448.0) / largest.float())[::2])
    assert op.x_encode[1] == 1
    assert torch.equal(op.weight_encode, torch.tensor(448.0) / op.weight.detach().abs().amax((1, 2)).float())


def test_delayed_scales_of_gradients_come_from_the_backwards_before():
    op = linear(fusible.Float8Tensor(gradient="e5m2", delayed=fusible.Delayed(history=2, margin=1)))
    for factor in (4, 1, 1, 1):
        run(op, dy=factor * tensor(T, N, seed=2))
        if factor == 4:
            assert torch.equal(op.gradient_encode, torch.ones(E))

    largest = tensor(T, N, seed=2)[70:270].abs().max().float()
    assert op.gradient_encode[2] == torch.tensor(57344.0 / 2) / largest


def test_delayed_scales_stay_outside_of_training_and_when_a_forward_is_computed_again():
    op, sizes, x = linear(DELAYED), torch.tensor(SIZES), tensor(T, K).requires_grad_()
    before = copy.deepcopy(op.state_dict())
    op.eval()(x, split_sizes=sizes)
    fusible.explain(op.train(), x, split_sizes=sizes)
    assert_state(op, before)

    plain, other = linear(DELAYED), linear(DELAYED)
    for _ in range(3):
        run(plain)
        y = checkpoint(lambda x: other(x, split_sizes=sizes), x, use_reentrant=False)
        y.backward(tensor(T, N, seed=2))
    assert_state(other, plain.state_dict())


def assert_state(model, expected):
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fused", [False, True])
def test_a_forward_without_gradients_is_no_step(mode, fused):
    """Such as that of a frozen teacher, or a generation between steps."""
    model, sizes = experts(DELAYED) if fused else linear(DELAYED), torch.tensor(SIZES)
    run_experts(model) if fused else run(model)
    before = copy.deepcopy(model.state_dict())
    with mode():
        model(7 * tensor(T, K), split_sizes=sizes)
    assert_state(model, before)


def test_a_frozen_layer_in_training_is_a_step():
    op = linear(DELAYED).requires_grad_(False)
    for _ in range(2):
        op(tensor(T, K), split_sizes=torch.tensor(SIZES))

    assert op.x_encode[0] != 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_reentrant_checkpoint_is_one_step(fused):
    def train(model, recomputed):
        for seed in range(3):
            x, sizes = tensor(T, K, seed=seed).requires_grad_(), torch.tensor(SIZES)
            call = lambda x, sizes=sizes: model(x, split_sizes=sizes)  # noqa: E731
            y = checkpoint(call, x, use_reentrant=True) if recomputed else call(x)
            y.backward(torch.ones_like(y))
        return x.grad

    plain, other = (experts(DELAYED) if fused else linear(DELAYED) for _ in range(2))
    assert torch.equal(train(plain, False), train(other, True))
    assert_state(other, plain.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_a_file_of_16_bits_leaves_delayed_scales_in_float32(assign):
    op, other = linear(DELAYED), linear(DELAYED)
    run(op)
    other.load_state_dict({name: value.bfloat16() for name, value in op.state_dict().items()}, assign=assign)
    run(other)

    assert {buffer.dtype for buffer in other.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half().bfloat16()]
)
def test_delayed_scales_stay_in_float32_where_a_layer_is_cast(cast):
    linear = fusible.GroupedLinear(2, 16, 16, recipe=DELAYED)
    model = cast(fusible.Sequential(linear))
    x = torch.randn(5, 16, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        model(x, split_sizes=[2, 3]).sum().backward()
    assert linear.weight.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in linear.buffers()} == {torch.float32}
    assert linear.x_encode.tolist() == pytest.approx([448 / rows.abs().max().item() for rows in x.split([2, 3])])


def test_delayed_scales_travel_with_the_state_dict():
    op, other = linear(DELAYED), linear(DELAYED)
    run(op)
    other.load_state_dict(op.state_dict())
    op.zero_grad()

    assert_equal(run(op), run(other))


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("frozen", [None, "0.weight", "2.weight"])
def test_fused_experts_keep_the_scales_of_their_ops(frozen, gradient):
    recipe = fusible.Float8Tensor(gradient=gradient, delayed=fusible.Delayed(history=2))
    model, other = experts(recipe, bias=False), experts(recipe, bias=False)
    for each, name in ((model, frozen), (other, frozen)):
        if name is not None:
            each.get_parameter(name).requires_grad_(False)
    for _ in range(3):
        with torch.no_grad():  # amaxes that change
            for each in (model, other):
                each[0].weight *= 1.5
        assert_equal(run_experts(model), run_experts(other, {"disable_fusions": UNFUSED}))
    assert_state(model, other.state_dict())


def test_a_backward_of_fused_experts_reads_the_scales_of_its_own_forward():
    def after_two_forwards(model, config):
        sizes, xs = torch.tensor(SIZES), [(factor * tensor(T, K)).requires_grad_() for factor in (1, 5)]
        with fusible.config(**config):
            run_experts(model)
            outputs = [model(x, split_sizes=sizes) for x in xs]
        for y in outputs:
            y.backward(tensor(T, K, seed=2))
        return {"first": xs[0].grad, "second": xs[1].grad, **{n: p.grad for n, p in model.named_parameters()}}

    model, other = experts(DELAYED, bias=False), experts(DELAYED, bias=False)
    assert_equal(after_two_forwards(model, {}), after_two_forwards(other, {"disable_fusions": UNFUSED}))
    assert_state(model, other.state_dict())


def test_routed_experts_keep_the_scales_of_their_ops():
    def outcome(model, config, **options):
        torch.manual_seed(7)
        x, weights = tensor(90, K).requires_grad_(), tensor(90, 2, seed=4, dtype=torch.float32).abs()
        ids = torch.randint(0, E, (90, 2), generator=torch.Generator().manual_seed(3))
        with fusible.config(**config):
            for _ in range(3):
                model.zero_grad()
                y = model(x, top_k_index=ids, top_k_weights=weights)
                y.backward(tensor(90, K, seed=2))
            shown = [step.name for step in model.explain(x, top_k_index=ids, top_k_weights=weights).steps]
        return shown, {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}

    def layer():
        act = fusible.ScaledSwiGLU()
        return experts(DELAYED, act, [fusible.Combine()], [fusible.Dispatch(E)], bias=False)

    model, other = layer(), layer()
    (shown, ours), (_, theirs) = outcome(model, {}), outcome(other, {"disable_fusions": UNFUSED})
    assert shown == ["RoutedMLP"]
    assert_equal(ours, theirs)
    assert_state(model, other.state_dict())


def test_a_scale_behind_experts_with_delayed_scales_is_no_part_of_them():
    """It would change the gradient whose amaxes the second linear keeps."""
    keywords = {"scales": tensor(T, dtype=torch.float32).abs()}
    model, other = (experts(DELAYED, second=[fusible.Scale()], bias=False) for _ in range(2))

    assert names(model, **keywords) == ["GroupedMLP", "Scale"]
    for _ in range(2):
        assert_equal(run_experts(model, **keywords), run_experts(other, {"disable_fusions": UNFUSED}, **keywords))
    assert_state(model, other.state_dict())
    layer = experts(DELAYED, second=[fusible.Scale(), fusible.Combine()], first=[fusible.Dispatch(E)], bias=False)
    routing = {"top_k_index": torch.zeros(9, 2, dtype=torch.long), "top_k_weights": torch.ones(9, 2)}
    shown = str(layer.explain(tensor(9, K).requires_grad_(), **routing))
    assert "the scale after fc2 would change the amaxes that delayed scales come from" in shown


def test_delayed_scales_need_a_linear_that_keeps_them():
    op, sizes = linear(None), torch.tensor(SIZES)
    with fusible.config(recipe=DELAYED):
        notes = fusible.explain(op, tensor(T, K), split_sizes=sizes).steps[0].notes
        with fusible.config(strict=True), pytest.raises(fusible.RefusedError, match="its own recipe"):
            op(tensor(T, K), split_sizes=sizes)

    assert any("keeps scales of earlier steps only with" in note for note in notes)


@pytest.mark.parametrize("recipe", [fusible.Float8Tensor, fusible.Float8Row])
def test_fast_accumulation_is_asked_for_and_changes_nothing_on_a_cpu(recipe):
    op, sizes = linear(recipe(fast_accumulation=True)), torch.tensor(SIZES)

    assert "fast accumulation" in str(fusible.explain(op, tensor(T, K), split_sizes=sizes))
    assert "fast accumulation" not in str(fusible.explain(linear(recipe()), tensor(T, K), split_sizes=sizes))
    assert_equal(run(op), run(linear(recipe())))


def test_explain_says_where_weights_are_quantised_for_few_rows() -> None:
    """As at a desk, for a GPU: on a CPU there is no faster product to gain from."""

    def notes(rows: int, device: str = "meta", **settings: Any) -> str:
        op = fusible.GroupedLinear(2, K, 32, dtype=torch.bfloat16, device=device, **settings)
        x, sizes = torch.empty(rows, K, dtype=torch.bfloat16, device=device), torch.tensor([rows, 0], device=device)
        return str(fusible.explain(op, x, split_sizes=sizes).steps[0].notes)

    block = fusible.Float8Block()
    assert "for 512 rows a group on average: below 2048, 16 bits may be faster" in notes(1024, recipe=block)
    assert "16 bits may be faster" not in notes(4096, recipe=block) + notes(1024) + notes(1024, "cpu", recipe=block)
    with fusible.same_weights():
        assert "16 bits may be faster" not in notes(1024, recipe=block)


# ---- what has no blocks


def test_features_that_have_no_blocks_are_not_quantised():
    op = fusible.GroupedLinear(E, K, 24, dtype=torch.bfloat16, recipe=fusible.NVFP4())
    sizes, why = torch.tensor(SIZES), "NVFP4 needs out_features that are multiples of 16, got 24"

    assert any(why in note for note in fusible.explain(op, tensor(T, K), split_sizes=sizes).steps[0].notes)
    with fusible.config(strict=True), pytest.raises(fusible.RefusedError, match=why):
        op(tensor(T, K), split_sizes=sizes)
    with pytest.raises(fusible.ArgumentError, match=f"quantize_: {why}"):
        fusible.quantize_(op, fusible.NVFP4())


def test_experts_of_which_one_has_no_blocks_are_fused_in_16_bits_or_op_by_op():
    model = experts(fusible.NVFP4(stochastic_rounding=False), hidden=24)

    assert names(model) != ["GroupedMLP"]
    assert_equal(run_experts(model), run_experts(model, {"disable_fusions": UNFUSED}))


# ---- weights that stay quantised

STAYING = {name: recipe for name, recipe in RECIPES.items() if "e5m2" not in name and "wgrad" not in name}
each_staying = pytest.mark.parametrize("recipe", STAYING.values(), ids=STAYING.keys())


@each_staying
@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": False}, {"transposed_weight": True}])
def test_quantised_weights_give_the_numbers_of_the_recipe(recipe, options):
    op = linear(recipe, bias=True, **options)
    stays = fusible.quantize_(copy.deepcopy(op), recipe)
    ours, theirs = run(stays), run(op)

    assert not any(p.requires_grad for name, p in stays.named_parameters() if name.startswith("weight"))
    assert torch.equal(ours["y"], theirs["y"])
    assert far(ours["x"], theirs["x"]) < (0.15 if isinstance(recipe, fusible.NVFP4) else 0.05)
    assert torch.equal(ours["bias"], theirs["bias"])


@each_staying
@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": False}])
def test_state_dicts_of_either_kind_are_loaded(recipe, options):
    op = linear(recipe, **options)
    stays, again = fusible.quantize_(linear(recipe, **options), recipe), fusible.quantize_(linear(recipe), recipe)
    with torch.no_grad():
        for matrix in op.matrices("weight"):
            matrix *= 3
    stays.load_state_dict(op.state_dict())
    expected = run(op)["y"]
    assert torch.equal(run(stays)["y"], expected)
    if not options:
        again.load_state_dict(stays.state_dict())
        assert torch.equal(run(again)["y"], expected)
    rounded = linear(None, **options)
    with pytest.warns(UserWarning, match="its rounded values are loaded"):
        rounded.load_state_dict(stays.state_dict())
    assert far(run(rounded)["y"], run(linear(None, **options))["y"] * 3) < 0.12


@each_staying
def test_quantised_experts_run_fused(recipe):
    model = fusible.quantize_(experts(recipe, single_grouped_weight=False), recipe)
    with torch.no_grad():
        y = model(tensor(T, K), split_sizes=torch.tensor(SIZES))
        assert names(model) == ["GroupedMLP"]

    assert torch.equal(y, run_experts(experts(recipe, single_grouped_weight=False))["y"])
    assert_equal(run_experts(model), run_experts(model, {"disable_fusions": UNFUSED}))


# ---- products where kernels do not multiply the bytes


@pytest.mark.parametrize("name", ["block", "row", "tensor power of two", "row e5m2"])
def test_products_in_16_bits_are_those_of_the_bytes(name):
    recipe, sizes = RECIPES[name], torch.tensor(SIZES)
    dy_rows, dy_columns = recipe.token_operands(tensor(T, K), sizes, True, True, is_gradient=True)
    _, x_columns = recipe.token_operands(tensor(T, N, seed=5), sizes, False, True)
    weight = recipe.weight_operands(tensor(E, N, K, seed=3), False).forward
    factors = {
        "bias": tensor(E, N, seed=4),
        "row_scale": tensor(T, seed=5).float(),
        "bias_scale": tensor(T, seed=6).float(),
    }

    def rows(out):
        return ScaledGemm(dy_rows, weight.data, weight.scales, 1, sizes, out, **factors)

    for make in (rows, lambda out: ScaledWgrad(dy_columns, x_columns, sizes, T, out, True)):
        shape = (T, N) if make is rows else (E, K, N)
        ours, theirs = torch.full(shape, 3.0), torch.full(shape, 3.0)
        dequantized.multiply(make(ours))
        loop.run(make(theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@each_recipe
def test_products_of_quantised_tensors_are_those_of_a_linear(recipe):
    if getattr(recipe, "wgrad", "float8") == "bfloat16":
        pytest.skip("the weight gradient is of 16 bits")
    op, sizes, quantize = linear(recipe), torch.tensor(SIZES), fusible.QuantizedGroupedTensor.quantize
    result = run(op)
    x = quantize(tensor(T, K), recipe, sizes, columnwise=True)
    dy = quantize(tensor(T, N, seed=2), recipe, sizes, columnwise=True, is_gradient=True)
    weight = quantize(op.weight.detach(), recipe, columnwise=True)

    assert far(quantized_products.forward(x, weight), result["y"]) < 1e-3
    assert far(quantized_products.input_grad(dy, weight), result["x"]) < 1e-3
    assert far(quantized_products.weight_grad(dy, x), result["weight"]) < 1e-3
