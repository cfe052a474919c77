"""``torch.compile(fullgraph=True)`` gives what eager gives: outputs, gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from models import mlp
from reference import assert_same
from torch import Tensor, nn

import fusible
from fusible import (
    GEGLU,
    GLU,
    Activation,
    AddExtraInput,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    GroupedLinear,
    Identity,
    Linear,
    MakeExtraOutput,
    Scale,
    ScaledSwiGLU,
    Sequential,
    SwiGLU,
    interleaved,
)

# what the compiler itself uses that is deprecated
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    *[pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")],
]
ROWS = 12
SIZES = torch.tensor([3, 4, 2])  # and a tail


def results(
    model: Callable[..., Any], parameters: list[nn.Parameter], x: Tensor, given: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Outputs, and the gradients of whatever requires one."""
    tensors = [t for t in (x, *given.values()) if isinstance(t, Tensor)] + parameters
    wanted = [t for t in tensors if t.requires_grad]
    y = model(x, **given)
    ys = y if isinstance(y, tuple) else (y,)
    douts = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in ys]
    grads = torch.autograd.grad(ys, wanted, douts, allow_unused=True) if wanted else ()
    return (*[t.detach() for t in ys], *grads)


def assert_compiles(model: nn.Module, x: Tensor, backend: str = "aot_eager", **given: Any) -> None:
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_same(results(compiled, parameters, x, given), results(model, parameters, x, given))


experts = partial(mlp, groups=3, features=8, hidden=8)


def rows(*shape: int, **options: Any) -> Tensor:
    return torch.rand(*(shape or (ROWS,)), requires_grad=True, **options)


def data(**options: Any) -> Tensor:
    return torch.randn(ROWS, 8, requires_grad=True, **options)


ACTIVATIONS = [
    SwiGLU(),
    SwiGLU(layout=interleaved(4)),
    GEGLU("tanh"),
    ClampedSwiGLU(),
    GLU("relu2"),
    Activation("relu2"),
    Activation("gelu"),
]


@pytest.mark.parametrize("act", ACTIVATIONS, ids=repr)
def test_activations_of_experts(act: nn.Module) -> None:
    assert_compiles(experts(act=act), data(), split_sizes=SIZES, scales=rows())


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"single_grouped_weight": False, "single_grouped_bias": False},
        {"transposed_weight": True},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_parameters_of_experts(options: dict[str, Any]) -> None:
    x = data(dtype=options.get("dtype", torch.float32))

    assert_compiles(experts(**options), x, split_sizes=SIZES, scales=rows())


class Addressed(nn.Module):
    """Every bias scaled, a scale before and after the second linear, in every way of giving a keyword."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (GroupedLinear(3, 8, n, scale_bias=True) for n in (16, 8))
        self.experts = Sequential(first, SwiGLU(), Scale(), second, Scale())

    def forward(self, x: Tensor, *, sizes: Tensor, p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Any:
        own = {0: {"bias_scale": r}, self.experts[2]: {"scales": p}, "3": {"bias_scale": s}, -1: {"scales": q}}
        return self.experts(x, split_sizes=sizes, op_kwargs=own)


def test_every_scale_and_every_kind_of_key() -> None:
    assert_compiles(Addressed(), data(), sizes=SIZES, p=rows(), q=rows(), r=rows(), s=rows())


FUSIONS = ["GroupedMLP", "GroupedLinearGLU", "GLUScale"]


@pytest.mark.parametrize("disabled", [FUSIONS[:n] for n in range(4)], ids=len)
def test_each_fusion_and_none(disabled: list[str]) -> None:
    with fusible.config(disable_fusions=disabled):
        assert_compiles(experts(), data(), split_sizes=SIZES, scales=rows())


def test_sizes_that_are_not_one_tensor_are_not_fused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts()

        def forward(self, x: Tensor, *, first: Tensor, second: Tensor, scales: Tensor) -> Any:
            return self.experts(x, first, scales, second)

    assert_compiles(Two(), data(), first=SIZES, second=SIZES.clone(), scales=rows())


X3 = torch.randn(3, 4, 8, requires_grad=True)
STRIDED = torch.randn(8, ROWS).mT.requires_grad_()


@pytest.mark.parametrize("x", [X3, STRIDED], ids=["3d", "strided"])
def test_shapes_of_x(x: Tensor) -> None:
    assert_compiles(experts(), x, split_sizes=SIZES.int(), scales=rows(*x.shape[:-1]))


def test_no_rows() -> None:
    x = torch.randn(0, 8, requires_grad=True)

    assert_compiles(experts(), x, split_sizes=torch.zeros(3, dtype=torch.int64), scales=rows(0))


@pytest.mark.parametrize("single", [True, False])
def test_grouped_linear_alone(single: bool) -> None:
    assert_compiles(GroupedLinear(3, 8, 16, single_grouped_weight=single), data(), split_sizes=SIZES)


def test_split_sizes_as_a_list() -> None:
    assert_compiles(GroupedLinear(3, 8, 16), data(), split_sizes=[3, 4, 2])


@pytest.mark.parametrize("op", [Scale(), ScaledSwiGLU()], ids=repr)
def test_other_ops_alone(op: nn.Module) -> None:
    assert_compiles(op, data(), scales=rows())


def hooked() -> nn.Module:
    model = Sequential(Sequential(Linear(8, 8), nn.ReLU()), Linear(8, 8))
    for module in (model[0], model[1]):
        module.register_forward_hook(lambda module, given, y: y * 2)
    return model


CONTAINERS = {
    "empty": Sequential,
    "identity": lambda: Sequential(Identity()),
    "basic": lambda: Sequential(Linear(8, 16), SwiGLU(), Bias(8), ConstantScale(0.5)),
    "residual": lambda: Sequential(MakeExtraOutput("res"), Linear(8, 8), Activation("silu"), AddExtraInput("res")),
    "extra output": lambda: Sequential(MakeExtraOutput("res"), Linear(8, 8)),
    "foreign": lambda: Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.ReLU()), Linear(8, 8)),
    "tied": lambda: Sequential(op := Linear(8, 8), Activation("silu"), op),
    "hooked": hooked,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str) -> None:
    assert_compiles(CONTAINERS[name](), data())


def test_nested_containers_and_composites() -> None:
    inside = Sequential(ScaledSwiGLU(), GroupedLinear(3, 8, 8))
    model = Sequential(nn.Linear(8, 8), Sequential(GroupedLinear(3, 8, 16)), inside, nn.ReLU())

    assert_compiles(model, data(), split_sizes=SIZES, scales=rows())


@pytest.mark.parametrize("frozen", [["0.weight"], ["0.weight", "0.bias"], ["3.weight", "3.bias"], []], ids=len)
@pytest.mark.parametrize("x_grad", [True, False])
def test_frozen_parameters(frozen: list[str], x_grad: bool) -> None:
    model = experts()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)

    assert_compiles(model, data().detach().requires_grad_(x_grad), split_sizes=SIZES, scales=rows().detach())


@pytest.mark.parametrize("context", [torch.no_grad, nullcontext], ids=["no_grad", "nothing to train"])
def test_inference(context: Callable[[], AbstractContextManager[Any]]) -> None:
    model, x, scales = experts().requires_grad_(False), data().detach(), rows().detach()
    with context():
        assert_compiles(model, x, split_sizes=SIZES, scales=scales)


@pytest.mark.parametrize("linear", [nn.Linear, Linear])
def test_autocast(linear: Callable[..., nn.Module]) -> None:
    model = Sequential(linear(8, 8), *experts())
    with torch.autocast("cpu", torch.bfloat16):
        assert_compiles(model, data(), split_sizes=SIZES, scales=rows())


def test_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts()

        def forward(self, x: Tensor, *, split_sizes: Tensor, scales: Tensor) -> Any:
            def run(x: Tensor, scales: Tensor) -> Any:
                return self.experts(x, split_sizes=split_sizes, scales=scales)

            return torch.utils.checkpoint.checkpoint(run, x, scales, use_reentrant=False)

    assert_compiles(Checkpointed(), data(), split_sizes=SIZES, scales=rows())


def test_inductor() -> None:
    model = Sequential(nn.LayerNorm(8), *experts(), nn.ReLU())
    x, scales = data(), rows()
    given = {"split_sizes": SIZES, "scales": scales}
    compiled = torch.compile(model, fullgraph=True)

    ours, eager = (results(f, list(model.parameters()), x, given) for f in (compiled, model))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("disabled", [[], ["GroupedMLP"]], ids=["fused", "unfused"])
def test_buffers_are_written(backend: str, disabled: list[str]) -> None:
    model, x, scales = experts(), data(), rows()
    dy, made = torch.randn(ROWS, 8), []
    for function in (model, torch.compile(model, fullgraph=True, backend=backend)):
        output, grad_input = torch.full((ROWS, 8), 7.0), torch.full((ROWS, 8), 7.0)
        own = {3: {"output": output}, 0: {"grad_input": grad_input}}
        with fusible.config(disable_fusions=disabled):
            y = function(x, split_sizes=SIZES, scales=scales, op_kwargs=own)
        grads = torch.autograd.grad(y, [x, scales, *model.parameters()], dy)
        assert not output.requires_grad
        made.append((y.detach(), *grads, output, grad_input))

    assert (made[0][-2][9:] == 7).all()  # the tail of a buffer stays
    assert_same(made[1], made[0])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_of_rows_and_groups_may_depend_on_data(backend: str, fused: bool) -> None:
    """As where a rank computes what rows it has got, or ``torch.bincount`` counts them."""
    model = experts()

    def run(x: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
        mine = (ids < 3).nonzero().squeeze(-1)
        return model(x[mine], split_sizes=torch.bincount(ids[mine], minlength=3), scales=scales[mine])

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    off = frozenset() if fused else {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), fusible.config(disable_fusions=off):
        for count in (ROWS, ROWS + 5):
            ids = (torch.arange(count) % 4).sort().values
            given = {"scales": rows(count), "ids": ids}
            x = torch.randn(count, 8, requires_grad=True)
            assert_same(*[results(f, list(model.parameters()), x, given) for f in (compiled, run)])
