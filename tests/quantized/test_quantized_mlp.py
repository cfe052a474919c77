"""Experts with a recipe: fused they give the numbers of their ops one by one, wherever they run."""

from __future__ import annotations

import pytest
import torch
from checks.recipes import assert_equal, far, tensor

import fusible

E, H, F = 3, 160, 144
SIZES = (70, 0, 200)
RECIPE = fusible.Float8Block()
UNFUSED = {"GroupedMLP", "GroupedLinearGLU", "RoutedMLP"}


def experts(recipe=RECIPE, act=None, second=None, fc2_recipe=None, dtype=torch.bfloat16, bias=False, **options):
    torch.manual_seed(1)
    act = fusible.SwiGLU() if act is None else act
    width = 2 * F if isinstance(act, (fusible.SwiGLU, fusible.ScaledSwiGLU)) else F
    options |= {"bias": bias, "dtype": dtype}
    fc2_recipe = recipe if fc2_recipe is None else fc2_recipe
    ops = [fusible.GroupedLinear(E, H, width, recipe=recipe, **options), act]
    ops.append(fusible.GroupedLinear(E, F, H, recipe=fc2_recipe, **options))
    return fusible.Sequential(*ops, *([] if second is None else [second]))


def run(model, *, x=None, dy=None, config=None, **keywords):
    """The output, the gradients of x and of the keywords, and those of the parameters."""
    model.zero_grad()
    x = (tensor(300, H) if x is None else x).clone().requires_grad_()
    leaves = {name: k.clone().requires_grad_() for name, k in keywords.items()}
    with fusible.config(**(config or {})):
        y = model(x, split_sizes=torch.tensor(SIZES), **leaves)
    y.backward(tensor(*y.shape, seed=2) if dy is None else dy)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **{name: leaf.grad for name, leaf in leaves.items()}, **grads}


def steps(model, config=None, **keywords):
    x = tensor(300, H).requires_grad_()
    with fusible.config(**(config or {})):
        return model.explain(x, split_sizes=torch.tensor(SIZES), **keywords)


BUILT = {
    "swiglu": {},
    "gelu": {"act": fusible.Activation("gelu")},
    "biases": {"bias": True},
    "float32 scales": {"recipe": fusible.Float8Block(scales="float32")},
    "bf16 wgrad": {"recipe": fusible.Float8Block(wgrad="bfloat16")},
    "one weight an expert": {"single_grouped_weight": False},
    "transposed weight": {"transposed_weight": True},
    "function": {"act": fusible.Pointwise(lambda x: torch.tanh(x) * x)},
}


@pytest.mark.parametrize("name", BUILT)
def test_fused_experts_give_the_bits_of_their_ops(name):
    model = experts(**BUILT[name])

    assert [step.name for step in steps(model).steps] == ["GroupedMLP"]
    assert_equal(run(model), run(model, config={"disable_fusions": UNFUSED}))


def test_scales_inside_the_activation_are_rounded_once():
    model, scales = experts(act=fusible.ScaledSwiGLU()), tensor(300, seed=5, dtype=torch.float32).abs()

    assert [step.name for step in steps(model, scales=scales).steps] == ["GroupedMLP"]
    assert_equal(run(model, scales=scales), run(model, config={"disable_fusions": UNFUSED}, scales=scales))


def test_a_scale_after_the_second_linear():
    """Fused, what is quantised is scaled in another place, so the roundings are others."""
    model, scales = experts(second=fusible.Scale()), tensor(300, seed=5, dtype=torch.float32).abs()
    ours, theirs = run(model, scales=scales), run(model, config={"disable_fusions": UNFUSED}, scales=scales)
    exact = run(experts(None, second=fusible.Scale()), scales=scales)

    assert ours.keys() == theirs.keys() == exact.keys()
    for name in ours:
        assert far(ours[name], exact[name]) < 1.1 * far(theirs[name], exact[name]) + 1e-3, name


@pytest.mark.parametrize("built", [{}, {"bias": True}])
def test_experts_are_close_to_those_of_16_bits(built):
    ours, theirs = run(experts(**built)), run(experts(None, **built))

    assert ours.keys() == theirs.keys()
    for name in ours:
        assert far(ours[name], theirs[name]) < 0.08, name
    assert far(ours["y"], theirs["y"]) > 0.01


@pytest.mark.parametrize(
    "frozen",
    [("0.weight",), ("2.weight",), ("0.weight", "2.weight"), ("x", "0.weight"), ("x", "0.weight", "0.bias"), ("x",)],
)
def test_frozen_parts_leave_the_other_gradients_as_they_are(frozen):
    model, whole = experts(bias=True), run(experts(bias=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = tensor(300, H).requires_grad_("x" not in frozen)
    y = model(x, split_sizes=torch.tensor(SIZES))
    y.backward(tensor(300, H, seed=2))
    grads = {name: p.grad for name, p in [("x", x), *model.named_parameters()]}

    assert {name for name, gradient in grads.items() if gradient is None} == set(frozen)
    for name, gradient in grads.items():
        assert gradient is None or torch.equal(gradient, whole[name]), name


def test_different_recipes_run_op_by_op():
    model = experts(fc2_recipe=fusible.NoRecipe())
    explanation = steps(model)

    assert "fc1 and fc2 have different recipes" in str(explanation)
    assert [step.name for step in explanation.steps] == ["GroupedLinearGLU", "GroupedLinear"]
    assert_equal(run(model), run(model, config={"disable_fusions": UNFUSED}))


def test_a_configured_recipe_fits_one_of_an_op():
    model = experts(None, fc2_recipe=RECIPE)

    assert len(steps(model).steps) == 2
    assert [step.name for step in steps(model, {"recipe": RECIPE}).steps] == ["GroupedMLP"]
    assert_equal(run(model, config={"recipe": RECIPE}), run(experts()))


def test_main_grads_of_fused_experts():
    model, expected = experts(accumulate_into_main_grad=True), run(experts())
    for weight in model.parameters():
        weight.main_grad = torch.ones(weight.shape)
    run(model)
    run(model)

    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.main_grad, 1 + 2 * expected[name].float(), rtol=0.01, atol=0.01)


def test_explain_lists_what_runs():
    step = steps(experts()).steps[0]

    assert [line.split(", ")[1] for line in step.configurations] == [
        "rows rows+columns",
        "weight both",
        "NT 300 x 288 x 160",
        "rows rows",
        "weight both",
        "NT 300 x 160 x 144",
    ]
    assert [line.split(", ")[1] for line in step.backward.configurations] == [
        "rows rows+columns",
        "NT 300 x 144 x 160",
        "rows rows+columns",
        "rows columns",
        "NT 300 x 160 x 288",
        "TN 288 x 160 x 300",
        "TN 160 x 144 x 300",
    ]


def routed(recipe=RECIPE, **options):
    torch.manual_seed(1)
    options |= {"bias": False, "dtype": torch.bfloat16, "recipe": recipe}
    return fusible.Sequential(
        fusible.Dispatch(E),
        fusible.GroupedLinear(E, H, 2 * F, **options),
        fusible.SwiGLU(),
        fusible.GroupedLinear(E, F, H, **options),
        fusible.Scale(),
        fusible.Combine(),
    )


def run_routed(model, config=None, grad=True):
    model.zero_grad()
    x = tensor(90, H).requires_grad_(grad)
    ids = torch.randint(0, E, (90, 2), generator=torch.Generator().manual_seed(3))
    weights = tensor(90, 2, seed=4, dtype=torch.float32).abs().requires_grad_(grad)
    with fusible.config(**(config or {})), torch.set_grad_enabled(grad):
        y = model(x, top_k_index=ids, top_k_weights=weights)
        names = [step.name for step in model.explain(x, top_k_index=ids, top_k_weights=weights).steps]
    if not grad:
        return {"y": y}, names
    y.backward(tensor(90, H, seed=2))
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}, names


@pytest.mark.parametrize("wgrad", ["float8", "bfloat16"])
def test_a_routed_layer_gives_the_bits_of_its_experts(wgrad):
    model = routed(fusible.Float8Block(wgrad=wgrad))
    whole, names = run_routed(model)
    parts, part_names = run_routed(model, {"disable_fusions": {"RoutedMLP"}})

    assert names == ["RoutedMLP"]
    assert "GroupedMLP" in part_names
    assert_equal(whole, parts)


@pytest.mark.parametrize("configured", [True, False])
def test_a_routed_layer_without_gradients_follows_its_recipe(configured):
    model = routed(None if configured else RECIPE)
    config = {"recipe": RECIPE} if configured else {}

    assert_equal(run_routed(model, config, grad=False)[0], {"y": run_routed(model, config)[0]["y"]})
    assert 0.01 < far(run_routed(model, config)[0]["y"], run_routed(routed(None))[0]["y"]) < 0.09


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_experts_give_the_same_bits():
    model, expected = experts(), run(experts())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = tensor(300, H).requires_grad_()
    y = compiled(x, split_sizes=torch.tensor(SIZES))
    y.backward(tensor(300, H, seed=2))

    assert torch.equal(y, expected["y"])
    assert torch.equal(x.grad, expected["x"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name])
