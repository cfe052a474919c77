"""Whole containers under ``config(backend="triton")`` in Triton's interpreter: they give the results of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton_interpreter
from torch import Tensor, nn

import fusible
from fusible import (
    AddExtraInput,
    Bias,
    Combine,
    Dispatch,
    GroupedLinear,
    GroupedLoRA,
    MoE,
    Pointwise,
    Scale,
    Sequential,
    SwiGLU,
    config,
    interleaved,
)
from fusible.ops.kernels.triton.shape import ProgramTile

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which computes rows of no group, too

E, K, F, T = 3, 12, 20, 23
TILE = ProgramTile(16, 32, 16, 4, 2, strip=2)
SIZES = torch.tensor([9, 0, 11])


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with triton_interpreter.interpreted() as launch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "tile_of", lambda problem: TILE)
        yield


def linears(**how: Any) -> tuple[GroupedLinear, GroupedLinear]:
    return GroupedLinear(E, K, 2 * F, **how), GroupedLinear(E, F, K, **how)


def mlp(act: nn.Module, *more: nn.Module, **how: Any) -> Sequential:
    up, down = linears(**how)
    return Sequential(up, act, *more, down)


def adapted() -> Sequential:
    return Sequential(GroupedLoRA(E, K, 2 * F, 8), SwiGLU(), Scale(), GroupedLoRA(E, F, K, 8))


def routed_adapters() -> Sequential:
    return Sequential(Dispatch(E), *adapted(), Combine())


def routed() -> Sequential:
    up, down = linears()
    return Sequential(Dispatch(E), up, SwiGLU(), Scale(), down, Combine())


SPLIT, SCALED = {"split_sizes": SIZES}, {"split_sizes": SIZES, "scales": torch.rand(T)}
ROUTED = {"top_k_index": torch.rand(T, E).argsort(-1)[:, :2], "top_k_weights": torch.rand(T, 2)}
ABSENT = {**ROUTED, "top_k_index": torch.tensor([[-1, 2], [0, E]]).repeat(T, 1)[:T].int()}
CONTAINERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "one linear": (lambda: GroupedLinear(E, K, 2 * F), SPLIT),
    "experts": (lambda: mlp(SwiGLU(), Scale()), SCALED),
    "without biases": (lambda: mlp(SwiGLU(), bias=False), SPLIT),
    "one parameter an expert": (
        lambda: mlp(SwiGLU(), Scale(), single_grouped_weight=False, single_grouped_bias=False),
        SCALED,
    ),
    "transposed": (lambda: mlp(SwiGLU(), transposed_weight=True), SPLIT),
    "interleaved": (lambda: mlp(SwiGLU(layout=interleaved(2))), SPLIT),
    "a function": (lambda: mlp(Pointwise(lambda gate, up: torch.tanh(gate) * up, halves="concat")), SPLIT),
    "a function of rows": (
        lambda: mlp(Pointwise(lambda gate, up, scales: torch.tanh(gate) * up * scales, halves="concat")),
        SCALED,
    ),
    "a bias of its own": (lambda: Sequential(GroupedLinear(E, K, K), Bias(K), GroupedLinear(E, K, F)), SPLIT),
    "a residual": (lambda: Sequential(GroupedLinear(E, K, K), AddExtraInput()), {**SPLIT, "extra": torch.randn(T, K)}),
    "adapters": (adapted, SCALED),
    "routed": (routed, ROUTED),
    "routed, partly to no expert": (routed, ABSENT),
    "routed to adapters, partly to no expert": (routed_adapters, ABSENT),
    "routed, with weights of 16 bits": (routed, {**ROUTED, "top_k_weights": torch.rand(T, 2).half()}),
    "routed, with weights of 64 bits": (routed, {**ROUTED, "top_k_weights": torch.rand(T, 2).double()}),
    "a layer": (lambda: MoE(K, F, E, top_k=2), {}),
}


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Fills new memory with NaN, of whole numbers with the largest one."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    given = {
        name: value.clone().requires_grad_() if value.is_floating_point() else value for name, value in given.items()
    }
    x = torch.linspace(-2, 2, T * K).view(T, K).sin().requires_grad_()
    y = model(x, **given)
    y = y if isinstance(y, Tensor) else y.y
    leaves = [x, *(value for value in given.values() if value.requires_grad), *model.parameters()]
    return [y, *torch.autograd.grad(y, leaves, torch.cos(y.detach()), allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_results_are_those_of_the_loop(name: str) -> None:
    make, given = CONTAINERS[name]
    model = make()
    expected = results(model, given)
    with config(backend="triton"):
        with new_memory_is_nan():
            found = results(model, given)
        explained = str(fusible.explain(model))

    assert "triton" in explained
    valid = T if not given or "split_sizes" not in given else int(SIZES.sum())
    for a, b in zip(found, expected, strict=True):
        of_rows = a.dim() and a.shape[0] == T
        torch.testing.assert_close(*((a[:valid], b[:valid]) if of_rows else (a, b)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [{"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}])
def test_weight_gradients_elsewhere(how: dict[str, bool]) -> None:
    model, found = mlp(SwiGLU(), Scale(), **how), list[list[Tensor]]()
    x = torch.randn(T, K)
    for backend in ("triton", "loop"):
        for weight in model.parameters():
            weight.grad, weight.main_grad = None, torch.ones_like(weight)  # type: ignore[attr-defined]
        with config(backend=backend):
            model(x, **SCALED).sum().backward()
            for op in (model[0], model[3]) if "delay_wgrad_compute" in how else ():
                op.backward_dw()
        written = [each for p in model.parameters() for each in (p.grad, p.main_grad)]  # type: ignore[attr-defined]
        found.append([each for each in written if each is not None])

    assert any(each.ne(1).any() for each in found[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_recomputation() -> None:
    model = mlp(SwiGLU(), Scale())
    expected = results(model, SCALED)
    with config(backend="triton", recompute=True):
        found = results(model, SCALED)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
