"""Parameters that parametrizations or hooks compute: autograd passes through, whichever op reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from reference import unit
from torch import Tensor, nn
from torch.nn import utils as old
from torch.nn.utils import parametrizations, parametrize, prune

from fusible import Bias, GroupedLinear, GroupedLoRA, Linear, Sequential, config, explain

E, K, F, T = 3, 4, 6, 10
SIZES = torch.tensor([3, 0, 5])
FUSED = [set(), {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}]


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Dropped(nn.Module):
    """Gives something else each time."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.5)


def mlp(single: bool = True, **how: bool) -> Sequential:
    torch.manual_seed(0)
    options = {"single_grouped_weight": single, "single_grouped_bias": single, **how}
    return models.mlp(E, K, F, dtype=torch.float64, **options)


def step(model: nn.Module, x: Tensor, **keywords: Tensor) -> dict[str, Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x, **keywords)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("name", ["weight", "bias", "weight0", "weight2", "bias1"])
@pytest.mark.parametrize("disabled", FUSED)
@pytest.mark.parametrize("index", [0, 3])
def test_computed_parameter_of_experts(index: int, disabled: set[str], name: str) -> None:
    single, x, keywords = name in ("weight", "bias"), unit(T, K), {"split_sizes": SIZES, "scales": unit(T)}
    model, plain = mlp(single), mlp(single)
    with config(disable_fusions=disabled):
        step(model, x, **keywords)  # what is known of this call must not be taken for the next
        parametrize.register_parametrization(model[index], name, Twice())
        getattr(plain[index], name).data.mul_(2)
        got, expected = step(model, x, **keywords), step(plain, x, **keywords)

    assert [len(s.ops) for s in model.explain().steps] == ([1] * 4 if disabled else [4])
    expected[f"{index}.parametrizations.{name}.original"] = 2 * expected.pop(f"{index}.{name}")
    torch.testing.assert_close(got, expected)
    with config(disable_fusions=disabled):
        parametrize.remove_parametrizations(model[index], name)
        torch.testing.assert_close(step(model, x, **keywords), step(plain, x, **keywords))


@pytest.mark.parametrize(("op", "name"), [(Linear(K, K), "weight"), (Linear(K, K), "bias"), (Bias(K), "bias")])
@pytest.mark.parametrize("alone", [False, True])
def test_computed_parameter_of_other_ops(op: nn.Module, name: str, alone: bool) -> None:
    if not parametrize.is_parametrized(op):
        parametrize.register_parametrization(op, name, Twice())
    x, value = unit(T, K, dtype=torch.float32), getattr(op, name).detach().requires_grad_()
    got = step(op if alone else Sequential(op), x)
    weights = {"weight": op.weight} if hasattr(op, "weight") else {"weight": torch.eye(K)}
    y = nn.functional.linear(x, **{**weights, "bias": op.bias, name: value})
    (gradient,) = torch.autograd.grad(y.square().sum(), value)

    torch.testing.assert_close(got["y"], y.detach())
    torch.testing.assert_close([g for n, g in got.items() if n.endswith(f"{name}.original")], [2 * gradient])


def test_weight_norm() -> None:
    ours, plain = Linear(K, K), nn.Linear(K, K)
    plain.load_state_dict(ours.state_dict())
    x = unit(T, K, dtype=torch.float32)

    torch.testing.assert_close(*[step(parametrizations.weight_norm(op), x) for op in (ours, plain)])


@pytest.mark.parametrize("disabled", FUSED)
def test_what_is_random_is_computed_once(disabled: set[str]) -> None:
    model, x = mlp(bias=False), unit(T, K)
    with config(disable_fusions=disabled):
        given = {"0.weight": model[0].weight * 2}
        torch.func.functional_call(model, given, x, {"split_sizes": SIZES, "scales": torch.ones(T)})
    parametrize.register_parametrization(model[0], "weight", Dropped())
    with config(disable_fusions=disabled):
        got = step(model, x, split_sizes=SIZES, scales=torch.ones(T))
    gradient = got["0.parametrizations.weight.original"][0]

    kept = gradient != 0
    assert kept.any()
    assert not kept.all()
    plain, weight = mlp(bias=False), 2 * kept * model[0].parametrizations.weight.original[0]
    plain[0].weight.data[0] = weight
    only_first = {"split_sizes": torch.tensor([3, 0, 0]), "scales": torch.ones(T)}
    torch.testing.assert_close(step(plain, x, **only_first)["y"][:3], got["y"][:3])


@pytest.mark.parametrize("name", ["weight", "weight1"])
@pytest.mark.parametrize("way", ["delay_wgrad_compute", "accumulate_into_main_grad"])
def test_gradient_of_a_computed_weight_goes_through_autograd(way: str, name: str) -> None:
    model = mlp(name == "weight", **{way: True})
    parametrize.register_parametrization(model[3], name, Twice())

    with pytest.raises(RuntimeError, match=f"GroupedLinear: {name} is computed by a parametrization"):
        step(model, unit(T, K), split_sizes=SIZES, scales=torch.ones(T))


# ------------------------------------------------------------------------------------------- what hooks compute


def pruned(module: nn.Module, name: str) -> nn.Module:
    torch.manual_seed(1)
    prune.random_unstructured(module, name, 0.5)
    return module


HOOKS = [pruned, old.weight_norm, old.spectral_norm]
OPS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "stacked": (lambda: GroupedLinear(E, K, F), "weight"),
    "one an expert": (lambda: GroupedLinear(E, K, F, single_grouped_weight=False), "weight1"),
    "transposed": (lambda: GroupedLinear(E, K, F, transposed_weight=True), "weight"),
    "lora": (lambda: GroupedLoRA(E, K, F, rank=2), "lora_b"),
    "base of lora": (lambda: GroupedLoRA(E, K, F, rank=2), "weight"),
}


def drawn(op: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_()
    return op


def wrapped(op: nn.Module, way: str) -> nn.Module:
    return {
        "alone": lambda: op,
        "in a container": lambda: Sequential(op),
        "behind one": lambda: Sequential(nn.ReLU(), op),
    }[way]()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", ["alone", "in a container", "behind one"])
def test_hooks_of_linear_are_torchs(way: str, hook: Any) -> None:
    models = []
    for make in (Linear, nn.Linear):
        torch.manual_seed(1)
        inner = hook(drawn(make(K, F)), "weight")
        models.append(
            wrapped(inner, way) if make is Linear else nn.Sequential(*[nn.ReLU()][way != "behind one" :], inner)
        )
    for _ in range(3):
        x = unit(T, K, dtype=torch.float32)
        ours, plain = (step(model, x) for model in models)
        torch.testing.assert_close([*ours.values()], [*plain.values()])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("way", ["alone", "in a container", "behind one"])
def test_hooks_of_experts(way: str, kind: str, hook: Any) -> None:
    make, name = OPS[kind]
    op, plain = hook(drawn(make()), name).eval(), drawn(make())
    x = unit(T, K, dtype=torch.float32)
    for _ in range(2):
        got = step(wrapped(op, way), x, split_sizes=SIZES)
        op(x, split_sizes=SIZES)  # its hook computes the value, with a graph
        computed, originals = getattr(op, name), [p for n, p in op.named_parameters() if n.startswith(f"{name}_")]
        getattr(plain, name).data.copy_(computed)
        expected = step(wrapped(plain, way), x, split_sizes=SIZES)
        gradients = torch.autograd.grad(computed, originals, getattr(plain, name).grad)

        torch.testing.assert_close([p.grad for p in originals], [*gradients])
        torch.testing.assert_close([got["y"], got["x"]], [expected["y"], expected["x"]])
        others = dict(plain.named_parameters())
        for other, parameter in op.named_parameters():
            if other in others:
                torch.testing.assert_close(parameter.grad, others[other].grad)


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_pruned_experts_without_gradients_and_after_removal(inference: Any) -> None:
    op = pruned(GroupedLinear(E, K, F), "weight")
    x = unit(T, K, dtype=torch.float32)
    before = step(op, x, split_sizes=SIZES)["y"]
    with inference():
        assert torch.equal(op(x, split_sizes=SIZES), before)
    assert torch.equal(step(op, x, split_sizes=SIZES)["y"], before)
    op.weight_orig.requires_grad_(False)
    assert step(op, x, split_sizes=SIZES)["weight_orig"] is None
    prune.remove(op, "weight")
    op.weight.requires_grad_()
    after = step(op, x, split_sizes=SIZES)
    assert torch.equal(after["y"], before)
    assert after["weight"].any()


def test_explain_of_pruned_experts() -> None:
    op = pruned(GroupedLinear(E, K, F), "weight")

    report = explain(op, unit(T, K, dtype=torch.float32), split_sizes=SIZES)
    assert report.steps[0].shape == (T, F)
    assert report.steps[0].backward is not None


@pytest.mark.parametrize("way", ["delay_wgrad_compute", "accumulate_into_main_grad"])
def test_gradient_of_a_pruned_weight_goes_through_autograd(way: str) -> None:
    op = pruned(GroupedLinear(E, K, F, **{way: True}), "weight")

    with pytest.raises(RuntimeError, match="weight is computed by a parametrization or a hook"):
        step(op, unit(T, K, dtype=torch.float32), split_sizes=SIZES)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_hooks_compile(hook: Any) -> None:
    op, x = hook(drawn(GroupedLinear(E, K, F)), "weight"), unit(T, K, dtype=torch.float32)
    eager = step(Sequential(op), x, split_sizes=SIZES)
    compiled = step(torch.compile(Sequential(op), fullgraph=True, backend="aot_eager"), x, split_sizes=SIZES)

    torch.testing.assert_close([*compiled.values()], [*eager.values()])


@pytest.mark.parametrize("op", [Linear(K, K), GroupedLinear(E, K, K)], ids=["linear", "grouped"])
def test_parameter_that_no_op_knows_is_named(op: nn.Module) -> None:
    """A hook may replace a parameter by one whose name does not say so; the op has no gradient for it."""
    op.raw = op.weight
    del op.weight
    op.register_forward_pre_hook(lambda module, _: setattr(module, "weight", 2 * module.raw))
    keywords = {"split_sizes": SIZES} if isinstance(op, GroupedLinear) else {}

    with pytest.raises(RuntimeError, match=r"returned no gradient for .*raw"):
        step(op, unit(T, K, dtype=torch.float32), **keywords)
