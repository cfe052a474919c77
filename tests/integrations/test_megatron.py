"""Megatron-Core's own code for the experts of its op fuser, on our ops: read from the installed package, not copied."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from models import steps
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible.integrations import transformer_engine as integration

E, H, FFN, SIZES = 4, 32, 64, [6, 0, 9, 5]
METHODS = (
    "_make_fused_ops",
    "_make_fused_impl_pre_forward_hook",
    "_ensure_main_grad",
    "_ensure_main_grad_for_fused_impl",
    "_fused_forward",
    "backward_dw",
)


def source() -> Path:
    """Megatron's file, which is not imported: it would need TransformerEngine."""
    try:
        found = find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        pytest.skip("megatron-core is not installed")
    path = Path(found.origin).parent / "transformer" / "moe" / "experts.py"
    if "_make_fused_ops" not in path.read_text():
        pytest.skip("this megatron-core builds no experts from TransformerEngine's ops")
    return path


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


class _NoOffload:
    """What Megatron wraps the call in, with offloading switched off."""

    def __init__(self, enabled: bool, tensor: Tensor, name: str) -> None:
        self.tensor = tensor

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *args: Any) -> None:
        return None

    def group_offload(self, output: Tensor, forced_released_tensors: Any) -> Tensor:
        return output


class Linear(nn.Module):
    """What ``_make_fused_ops`` reads of a TEGroupedLinear."""

    def __init__(self, inputs: int, outputs: int, *, single: bool, bias: bool, main_grad: bool, delay: bool) -> None:
        super().__init__()
        self.num_gemms, self.in_features, self.out_features, self.use_bias = E, inputs, outputs, bias
        self.single_grouped_weight = self.single_grouped_bias = single
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = main_grad, delay
        self.hooks_ran = 0
        values = {"weight": torch.randn(E, outputs, inputs) / inputs**0.5}
        values |= {"bias": torch.randn(E, outputs)} if bias else {}
        for name, value in values.items():
            for key, part in [(name, value)] if single else [(f"{name}{i}", v.clone()) for i, v in enumerate(value)]:
                self.register_parameter(key, nn.Parameter(part))
        for key, parameter in self.named_parameters():
            if main_grad and key.startswith("weight"):
                parameter.main_grad = torch.zeros_like(parameter)
                parameter.grad_added_to_main_grad = False

    def stacked(self, name: str) -> Tensor:
        return getattr(self, name) if self.single_grouped_weight else torch.stack(self.parts(name))

    def parts(self, name: str) -> list[Any]:
        return [getattr(self, f"{name}{i}") for i in range(E)]

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        self.hooks_ran += 1


def namespace(engine: Any) -> dict[str, Any]:
    """The names of Megatron's module that its methods use."""
    return {
        "te": engine,
        "HAVE_TE": True,
        "torch": torch,
        "F": F,
        "inspect": inspect,
        "chain": chain,
        "nullcontext": nullcontext,
        "Callable": Callable,
        "Optional": Optional,
        "quick_gelu": quick_gelu,
        "squared_relu": squared_relu,
        "skip_routed_expert_padding": lambda config: True,  # as with dispatchers that have padded, or need not
        "off_interface": _NoOffload,
        "OUTPUT_BUFFER_KEY": "output",
        "GRAD_INPUT_BUFFER_KEY": "grad_input",
    }


def megatrons_class(engine: Any) -> type:
    """A class of Megatron's methods, in the order in which they stand there."""
    tree = ast.parse(source().read_text())
    original = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "TEGroupedMLP")
    methods = [n for n in original.body if isinstance(n, ast.FunctionDef) and n.name in METHODS]
    assert sorted(method.name for method in methods) == sorted(METHODS)
    extracted = ast.ClassDef("TEGroupedMLP", [], [], methods, [], type_params=[])
    future = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*future, extracted], []))
    names = namespace(engine)
    exec(compile(module, "megatron", "exec"), names)
    return names["TEGroupedMLP"]


ENGINE = SimpleNamespace(pytorch=SimpleNamespace(ops=integration))
NONE = dict.fromkeys(
    (
        "moe_mlp_glu_interleave_size",
        "activation_func_clamp_value",
        "use_fused_weighted_squared_relu",
        "fp8",
        "fp4",
        "moe_paged_stash",
    )
)


def experts(act: Any = F.silu, gated: bool = True, engine: Any = ENGINE, config: Any = (), **how: Any) -> Any:
    """The module as its ``__init__`` leaves it."""
    how = {"single": False, "bias": False, "main_grad": False, "delay": False, **how}
    torch.manual_seed(0)
    mlp = megatrons_class(engine)()
    mlp.config = SimpleNamespace(**{**NONE, "activation_func": act, "gated_linear_unit": gated, **dict(config)})
    mlp.linear_fc1, mlp.linear_fc2 = Linear(H, FFN * (1 + gated), **how), Linear(FFN, H, **how)
    mlp._fused_ops, mlp._with_fused_impl, mlp._use_grouped_tensor = None, True, True
    return mlp


def reference(mlp: Any, x: Tensor, probs: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """What SequentialMLP computes: expert by expert, the probability after the activation and on the last bias."""
    parts, start = [], 0
    for e, size in enumerate(SIZES):
        rows, p = x[start : start + size], probs[start : start + size, None]
        weights = [linear.stacked("weight")[e] for linear in (mlp.linear_fc1, mlp.linear_fc2)]
        biases = [linear.stacked("bias")[e] if linear.use_bias else 0 for linear in (mlp.linear_fc1, mlp.linear_fc2)]
        hidden = act(rows @ weights[0].T + biases[0]) * p
        parts.append(hidden @ weights[1].T + biases[1] * p)
        start += size
    return torch.cat(parts)


def glu(act: Callable[[Tensor], Tensor], block: int | None = None, limit: float | None = None, offset: float = 0.0):
    def apply(pre: Tensor) -> Tensor:
        pre = pre if block is None else pre.view(-1, FFN // block, 2, block).transpose(1, 2).reshape(-1, 2 * FFN)
        gate, up = pre.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return act(gate) * (up + offset)

    return apply


SWIGLU = glu(F.silu)
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "one weight an expert": ({}, SWIGLU),
    "one weight": ({"single": True}, SWIGLU),
    "bias": ({"bias": True}, SWIGLU),
    "one bias": ({"bias": True, "single": True}, SWIGLU),
    "interleaved": ({"config": {"moe_mlp_glu_interleave_size": 32}}, glu(F.silu, block=32)),
    "clamped": ({"config": {"activation_func_clamp_value": 0.5}}, glu(F.silu, limit=0.5)),
    "quick gelu": ({"act": quick_gelu}, glu(quick_gelu, limit=7.0, offset=1.0)),
    "quick gelu, clamped": (
        {"act": quick_gelu, "config": {"activation_func_clamp_value": 0.5}},
        glu(quick_gelu, limit=0.5, offset=1.0),
    ),
    "squared relu": (
        {"act": squared_relu, "gated": False, "config": {"use_fused_weighted_squared_relu": True}},
        squared_relu,
    ),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), H, generator=generator).requires_grad_()
    return x, torch.tensor(SIZES), torch.rand(sum(SIZES), generator=generator).requires_grad_()


def weights_of(mlp: Any) -> list[nn.Parameter]:
    return [*mlp.linear_fc1.parameters(), *mlp.linear_fc2.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_megatrons_experts_are_its_unfused_experts(name: str) -> None:
    how, act = CASES[name]
    mlp, (x, sizes, probs) = experts(**how), inputs()
    y, expected = mlp._fused_forward(x, sizes, probs), reference(mlp, x, probs, act)
    wanted, dy = [x, probs, *weights_of(mlp)], torch.randn_like(x)

    assert steps(mlp._fused_ops[0]) == ["GroupedMLP"]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy))


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delay", [True, False])
def test_weight_gradients_go_to_main_grad(delay: bool, single: bool) -> None:
    mlp, (x, sizes, probs) = experts(main_grad=True, delay=delay, single=single), inputs()
    expected, dy = reference(mlp, x, probs, SWIGLU), torch.randn_like(x)
    gradients = torch.autograd.grad(expected, weights_of(mlp), dy)
    mlp._fused_forward(x, sizes, probs).backward(dy)

    assert weights_of(mlp)[0].main_grad.any() != delay
    if delay:
        mlp.backward_dw()
    torch.testing.assert_close([p.main_grad for p in weights_of(mlp)], list(gradients))
    assert [linear.hooks_ran for linear in (mlp.linear_fc1, mlp.linear_fc2)] == [int(delay)] * 2


def test_dispatchers_buffers_are_written() -> None:
    mlp, (x, sizes, probs) = experts(bias=True), inputs()
    output, grad_input, dy = torch.empty_like(x), torch.empty_like(x), torch.randn_like(x)
    y = mlp._fused_forward(x, sizes, probs, output, grad_input)
    y.backward(dy)
    expected = reference(mlp, x, probs, SWIGLU)

    assert y.data_ptr() == output.data_ptr()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(grad_input, torch.autograd.grad(expected, x, dy)[0])


def test_hooks_of_the_linears_run_before_the_container() -> None:
    mlp, (x, sizes, probs), seen = experts(), inputs(), []
    mlp.linear_fc1.register_forward_pre_hook(lambda module, _: seen.append(module))
    mlp._fused_forward(x, sizes, probs)

    assert seen == [mlp.linear_fc1]


@pytest.mark.parametrize("switch", ["moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"])
def test_mxfp8_dispatch_is_refused(switch: str) -> None:
    mlp = experts(config={switch: "mxfp8"})

    with pytest.raises(NotImplementedError, match=f"{switch}='mxfp8' needs TransformerEngine's"):
        mlp._fused_forward(*inputs())


def test_install_puts_the_ops_where_the_experts_look() -> None:
    class Theirs(SimpleNamespace):
        pass

    engine = Theirs(pytorch=Theirs(ops=Theirs(), GroupedLinear="theirs"), common="theirs")
    module: Any = ModuleType("experts")
    module.te, module.TEGroupedMLP = engine, megatrons_class(engine)
    integration.install(module)
    integration.install(module)  # twice is once

    assert module.te.pytorch.ops is integration
    assert (module.te.pytorch.GroupedLinear, module.te.common) == ("theirs", "theirs")
    mlp = experts(engine=module.te)
    assert isinstance(mlp._make_fused_ops(), fusible.Sequential)
    integration.uninstall(module)
    assert module.te is engine


# ------------------------------------------------------------------------------- without Megatron: names and arguments


def test_install_needs_experts_that_are_built_from_ops() -> None:
    module: Any = ModuleType("experts")
    module.te = SimpleNamespace()
    with pytest.raises(ImportError, match="experts builds no experts from TransformerEngine's ops"):
        integration.install(module)


def test_names_and_defaults_are_transformer_engines() -> None:
    defaults = {
        name: {p.name: p.default for p in inspect.signature(getattr(integration, name)).parameters.values()}
        for name in ("GroupedLinear", "ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU")
    }

    assert defaults["GroupedLinear"]["single_grouped_weight"] is False
    assert "scale_bias" in inspect.signature(integration.GroupedLinear.__init__).parameters
    assert defaults["ScaledSwiGLU"] == {"glu_interleave_size": None, "activation_recompute_in_mlp": False}
    assert defaults["ScaledClampedQGeGLU"] == {
        "glu_interleave_size": None,
        "limit": 7.0,
        "alpha": 1.702,
        "glu_linear_offset": 1.0,
        "activation_recompute_in_mlp": False,
    }
    assert (integration.OUTPUT_BUFFER_KEY, integration.GRAD_INPUT_BUFFER_KEY) == ("output", "grad_input")


def test_ops_of_these_names_fuse_and_may_be_replayed() -> None:
    fc1 = integration.GroupedLinear(E, H, 2 * FFN, bias=False)
    fc2 = integration.GroupedLinear(E, FFN, H, bias=True, scale_bias=True)
    model = integration.Sequential(fc1, integration.ScaledSwiGLU(glu_interleave_size=0), fc2)
    x, sizes, probs = inputs()
    model(x, sizes, probs, sizes, probs)

    assert steps(model) == ["GroupedMLP"]
    assert fc1.replayable
    assert model._compiled.last.plan.steps[0].replay_refusal is None
