"""Modules that write into their input, behind ops and beside extra outputs: what ``nn.Sequential`` gives, or raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusible import (
    Activation,
    AddExtraInput,
    Bias,
    ConstantScale,
    GroupedLinear,
    Identity,
    Linear,
    MakeExtraOutput,
    Pointwise,
    Scale,
    Sequential,
    SwiGLU,
)

K, ROWS = 4, 3
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


class Adds(nn.Module):
    """Works in place and does not say so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def branch(*between: Any) -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(K, K), MakeExtraOutput("r"), *between, AddExtraInput("r"))


def outcome(model: Callable[[Tensor], Tensor], mode: str) -> list[Tensor]:
    """The result and, where they are recorded, the gradients of x and of the parameters."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, K, requires_grad=True)
    with MODES[mode]():
        y = model(x)
    if mode != "grad":
        return [y]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between", [[], [Identity()], [nn.Identity()]], ids=["next to it", "Identity", "nn.Identity"])
def test_an_in_place_module_leaves_an_extra_output_as_it_is(mode: str, between: list[nn.Module]) -> None:
    ours, expected = branch(*between, nn.ReLU(inplace=True)), branch(*between, nn.ReLU())
    for _ in range(3):
        torch.testing.assert_close(outcome(ours, mode), outcome(expected, mode))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_an_in_place_module_leaves_an_extra_output_as_it_is_in_compiled_code(mode: str, backend: str) -> None:
    model = branch(nn.ReLU(inplace=True))
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    torch.testing.assert_close(outcome(compiled, mode), outcome(branch(nn.ReLU()), mode))


def test_an_in_place_module_leaves_a_returned_extra_output_as_it_is() -> None:
    x = torch.randn(ROWS, K)
    y, r = Sequential(MakeExtraOutput("r"), nn.ReLU(inplace=True))(x)

    torch.testing.assert_close([y, r], [x.relu(), x])


def test_the_copy_is_made_only_where_memory_is_shared() -> None:
    seen = []

    class InPlace(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.data_ptr())
            return super().forward(x)

    pointers: list[int] = []
    watch = ConstantScale(2.0)
    watch.register_forward_hook(lambda module, args, y: pointers.append(y.data_ptr()))
    with torch.no_grad():
        Sequential(MakeExtraOutput("r"), watch, InPlace(inplace=True), AddExtraInput("r"))(torch.randn(ROWS, K))
        Sequential(MakeExtraOutput("r", output_to_caller=False), watch, InPlace(inplace=True))(torch.randn(ROWS, K))

    assert seen == pointers


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_a_module_that_does_not_say_that_it_works_in_place_raises(mode: str) -> None:
    with pytest.raises(RuntimeError, match=r"^op 2 \(Adds\) has modified its input in place, .* extra output 'r'"):
        outcome(branch(Adds()), mode)


def test_explain_notes_the_copy() -> None:
    steps = branch(nn.ReLU(inplace=True)).explain(torch.ones(ROWS, K)).steps

    assert steps[2].notes == ("its input is copied: it works in place, and 'r' shares that memory",)


# ------------------------------------------------------------------------------------------------- behind ops

BEHIND: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "Identity": (Identity, {}),
    "Linear": (lambda: Linear(K, K), {}),
    "Bias": (lambda: Bias(K), {}),
    "ConstantScale": (lambda: ConstantScale(2.0), {}),
    "SwiGLU": (SwiGLU, {}),
    "Activation": (lambda: Activation("silu"), {}),
    "Scale": (Scale, {"scales": torch.ones(ROWS)}),
    "AddExtraInput": (lambda: AddExtraInput("r"), {"r": torch.ones(ROWS, K)}),
    "Pointwise": (lambda: Pointwise(torch.tanh), {}),
    "Pointwise by PyTorch": (lambda: Pointwise(torch.special.i0), {}),
    "GroupedLinear": (lambda: GroupedLinear(2, K, K), {"split_sizes": [2, 1]}),
}


def of_shape(value: Any, lead: tuple[int, ...]) -> Any:
    return value.view(*lead, *value.shape[1:]) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("lead", [(ROWS,), (1, ROWS)], ids=["matrix", "batch"])
@pytest.mark.parametrize("name", BEHIND)
def test_an_in_place_module_runs_behind_every_op(name: str, lead: tuple[int, ...]) -> None:
    build, keywords = BEHIND[name]
    keywords = {k: of_shape(v, lead) for k, v in keywords.items()}
    fc, op, results = nn.Linear(K, K), build(), []
    for in_place in (True, False):
        x = torch.linspace(-1, 1, ROWS * K).view(*lead, K).requires_grad_()
        y = Sequential(fc, op, nn.ReLU(inplace=in_place))(x, **keywords)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, fc.weight])])

    torch.testing.assert_close(*results)


def test_a_leaf_behind_identity_is_refused_as_torch_refuses_it() -> None:
    x = torch.ones(ROWS, K, requires_grad=True)
    for identity in (Identity(), nn.Identity()):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
            Sequential(identity, nn.ReLU(inplace=True))(x)


def test_what_the_caller_computed_is_tracked_through_identity() -> None:
    grads = []
    for identity in (Identity(), nn.Identity()):
        x = torch.linspace(-1, 1, K).requires_grad_()
        hidden = x * 2
        Sequential(identity, nn.ReLU(inplace=True))(hidden)
        grads.append(torch.autograd.grad(hidden.sum(), x)[0])

    torch.testing.assert_close(*grads)


def test_identity_gives_x_itself() -> None:
    x = torch.ones(ROWS, K, requires_grad=True)

    assert Sequential(Identity())(x) is x
    assert Identity()(x) is x


def test_a_half_of_its_own_is_run_where_a_base_class_passes_x_on() -> None:
    class Doubles(Identity):
        def fwd(self, x: Tensor) -> tuple[Tensor, None]:
            return 2 * x, None

    patched = Identity()
    patched.fwd = lambda x: (2 * x, None)  # type: ignore[method-assign]
    x = torch.ones(ROWS, K)

    assert [op(x).sum().item() for op in (Doubles(), patched)] == [2 * ROWS * K] * 2
