"""Parameters that torch.nn.utils.parametrize computes: autograd passes through, whichever op reads them."""

from __future__ import annotations

import models
import pytest
import torch
from reference import unit
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fusible import Bias, GroupedLinear, Linear, Sequential, config

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


@pytest.mark.parametrize("op", [Linear(K, K), GroupedLinear(E, K, K)], ids=["linear", "grouped"])
def test_parameter_that_no_op_knows_is_named(op: nn.Module) -> None:
    """Hooks that replace a parameter give the op one that it has no gradient for."""
    prune.identity(op, "weight")
    keywords = {"split_sizes": SIZES} if isinstance(op, GroupedLinear) else {}

    with pytest.raises(RuntimeError, match=r"returned no gradient for .*weight_orig"):
        step(op, unit(T, K, dtype=torch.float32), **keywords)
